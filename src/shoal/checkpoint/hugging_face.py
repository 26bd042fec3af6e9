"""Weights as Hugging Face keeps them: safetensors files of whole tensors, with an index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.data_files import (
    CODES,
    PlannedRegion,
    Progress,
    RegionReader,
    by_width,
    plan_regions,
    write_file,
)
from shoal.checkpoint.disk import Folder, checkpoint_at, disk_errors
from shoal.checkpoint.manifest import Manifest, TensorEntry, read_manifest
from shoal.checkpoint.offline import outline, read_region, write_offline
from shoal.checkpoint.storage import Checkpoint, FileNames
from shoal.checkpoint.training import MODEL
from shoal.checkpoint.untrusted import strict_json
from shoal.errors import CheckpointError
from shoal.files import open_regular
from shoal.layout.region import Region

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_FILE_BYTES = 5_000_000_000
"""A file of an export is about this long, unless one tensor is longer."""

_MAX_INDEX_BYTES = 1 << 28
_DATA_FILES = FileNames(
    pattern=re.compile(r"[\w.-]+\.safetensors"), example="model-00001-of-00002.safetensors"
)
Adjust = Callable[[str, Region, torch.Tensor], torch.Tensor]
"""Given a tensor's name, and the values of a region of it, what to write in their place."""

_DTYPES = {code: dtype for dtype, code in CODES.items()}


def export_weights(
    source: Folder | Checkpoint,
    folder: Folder | Checkpoint,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: Progress | None = None,
    omit: Set[str] = frozenset(),
    files: Mapping[str, bytes] | None = None,
    adjust: Adjust | None = None,
) -> None:
    """Write the model of a checkpoint for Hugging Face; needs memory for one whole tensor.

    The optimizer stays behind. `dtype` converts floating-point weights, `omit` names tensors that
    are not written, `files` go beside the weights, and `adjust` changes what is written.
    """
    source, checkpoint = checkpoint_at(source), checkpoint_at(folder)
    manifest = read_manifest(source)
    with checkpoint.create().discarded_on_error() as unfinished:
        with RegionReader(source, manifest) as reader:
            planned = [
                item
                for item in _whole_tensors(source, reader, manifest, dtype, adjust)
                if item.name not in omit
            ]
            for name, data in (files or {}).items():
                unfinished.write(name, [data], len(data))
            _write_files(unfinished, planned, max_file_bytes, progress)
        unfinished.publish(checkpoint)


def import_weights(
    source: Folder, folder: Folder | Checkpoint, progress: Progress | None = None
) -> None:
    """Make a checkpoint of Hugging Face's files, whose model `load_model` loads on any ranks.

    Each tensor comes from the file that the index names for it. Files that the index does not
    name are not opened. They are in a local folder: the safetensors library reads them.
    """
    from safetensors import SafetensorError

    source = Path(source)
    with ExitStack() as stack:
        slices = open_weights(source, stack)
        try:
            outlines = {
                MODEL + key: outline(values.get_shape(), _dtype(key, values.get_dtype()), "plain")
                for key, values in slices.items()
            }
            planned = [
                item
                for key, values in slices.items()
                for item in plan_regions(
                    MODEL + key,
                    Region.whole(values.get_shape()),
                    outlines[MODEL + key].dtype,
                    partial(_slice, values),
                )
            ]
            write_offline(checkpoint_at(folder), outlines, [planned], {}, progress)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{source} cannot be read as safetensors: {error}") from error


def _whole_tensors(
    source: Checkpoint,
    reader: RegionReader,
    manifest: Manifest,
    dtype: torch.dtype | None,
    adjust: Adjust | None,
) -> Iterator[PlannedRegion]:
    names = [name for name in manifest.tensors if name.startswith(MODEL)]
    if not names:
        raise CheckpointError(f"{source} holds no tensor under {MODEL!r}: nothing to export")
    for name in names:
        entry = manifest.tensors[name]
        becomes = dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype
        yield PlannedRegion(
            name=name.removeprefix(MODEL),
            region=Region.whole(entry.shape),
            dtype=becomes,
            source=partial(_converted, reader, name, entry, becomes, adjust),
        )


def _converted(
    reader: RegionReader,
    name: str,
    entry: TensorEntry,
    dtype: torch.dtype,
    adjust: Adjust | None,
    region: Region,
) -> torch.Tensor:
    values = read_region(reader, name, entry, region)
    if adjust is not None:
        values = adjust(name.removeprefix(MODEL), region, values)
    return values.to(dtype)


def _write_files(
    unfinished: Checkpoint,
    planned: Sequence[PlannedRegion],
    max_file_bytes: int,
    progress: Progress | None,
) -> None:
    def note(item: PlannedRegion, start: int, data: memoryview) -> None:
        if progress is not None:
            progress(len(data))

    files = list(_packed(planned, max_file_bytes))
    index: dict[str, str] = {}
    for number, packed in enumerate(files, start=1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        index |= {item.name: name for item in packed}
        write_file(unfinished, name, {b.name: b for b in packed}, note, {"format": "pt"})
    if len(files) > 1:
        size = sum(item.num_bytes for item in planned)
        content = {"metadata": {"total_size": size}, "weight_map": index}
        text = json.dumps(content, indent=2).encode()
        unfinished.write(INDEX, [text], len(text))


def _packed(planned: Sequence[PlannedRegion], max_file_bytes: int) -> Iterator[list[PlannedRegion]]:
    """Fill files one after another."""
    packed: list[PlannedRegion] = []
    for item in by_width(planned):
        if packed and sum(b.num_bytes for b in packed) + item.num_bytes > max_file_bytes:
            yield packed
            packed = []
        packed.append(item)
    yield packed


def open_weights(source: Path, stack: ExitStack) -> dict[str, Any]:
    """Open the files of a folder until `stack` ends; each tensor, as its file gives slices of it.

    Raises a `CheckpointError` if index and files do not agree, or a file cannot be read.
    """
    weights = _weight_map(source)
    names = [SINGLE] if weights is None else sorted(set(weights.values()))
    files = {name: _opened(source / name, stack) for name in names}
    held = {name: set(file.keys()) for name, file in files.items()}
    if weights is None:
        weights = dict.fromkeys(sorted(held[SINGLE]), SINGLE)
    try:
        _check_held(weights, held)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}. Download the folder anew") from error
    return {key: files[name].get_slice(key) for key, name in weights.items()}


def _check_held(weights: Mapping[str, str], held: Mapping[str, Set[str]]) -> None:
    """Raise unless each tensor is in the file that the index names, and no other is in any."""
    for key, name in weights.items():
        if key not in held[name]:
            others = [other for other in held if key in held[other]]
            where = f"but {others[0]} holds it" if others else "and no file that it names holds it"
            raise CheckpointError(f"{INDEX} names {name} for {key!r}, {where}")
    for name, keys in held.items():
        strays = sorted(keys - weights.keys())
        if strays:
            raise CheckpointError(f"{name} holds {strays[0]!r}, which {INDEX} does not name")


def _weight_map(source: Path) -> dict[str, str] | None:
    """The file of each tensor, as the index says; None where there is a single file."""
    path = source / INDEX
    present = [name for name in (INDEX, SINGLE) if os.path.lexists(source / name)]
    if INDEX not in present:
        if not present:
            raise CheckpointError(_nothing_to_import(source))
        return None
    data = checkpoint_at(source).read_whole(INDEX, _MAX_INDEX_BYTES)
    try:
        index: Any = strict_json(data)
        weights = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weights, dict) or not weights:
            raise CheckpointError("it has no weight_map that says which file holds which tensor")
        weights = {key: _DATA_FILES.check(name) for key, name in weights.items()}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable as JSON: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if SINGLE in present and SINGLE not in weights.values():
        raise CheckpointError(
            f"{source} holds both {INDEX} and {SINGLE}, which the index does not name: "
            "move one of them away"
        )
    return weights


def _nothing_to_import(source: Path) -> str:
    names = sorted(path.name for path in source.iterdir()) if source.is_dir() else []
    pickles = [name for name in names if name.startswith("pytorch_model")]
    if pickles:
        return f"{source}: {pickles[0]} is a pickle, which is not read: convert it to safetensors"
    files = [name for name in names if name.endswith(".safetensors")]
    found = f"; it holds {files[0]}, and no index that says what is where" if files else ""
    return f"{source} holds neither {INDEX} nor {SINGLE}{found}"


def _opened(path: Path, stack: ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open

    with disk_errors("read", path):
        open_regular(path).close()
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _dtype(key: str, code: str) -> torch.dtype:
    if code not in _DTYPES:
        raise NotImplementedError(f"{key!r}: importing tensors of {code} is not supported")
    return _DTYPES[code]


def _slice(values: Any, region: Region) -> torch.Tensor:
    return values[region.slices] if region.sizes else values[...]

"""Checkpoints that `torch.distributed.checkpoint` wrote, made into ours."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shoal.checkpoint import file_names
from shoal.checkpoint.bounded_pickle import Record
from shoal.checkpoint.disk import Folder, disk_errors, open_regular, read_whole
from shoal.checkpoint.foreign import is_record, read_item, unpickle_metadata
from shoal.checkpoint.metadata import JSON, check_json
from shoal.checkpoint.offline import Progress, outline, write_offline
from shoal.checkpoint.placement import Share
from shoal.checkpoint.storage import CODES, Block
from shoal.errors import CheckpointError, UsageError
from shoal.layout.region import Region

METADATA = ".metadata"
_MAX_METADATA_BYTES = 1 << 28
_MAX_DIMS = 64
_Key = tuple[str, tuple[int, ...] | None]


def import_dcp(
    source: Folder,
    folder: Folder,
    *,
    rename: Callable[[str], str] = str,
    progress: Progress | None = None,
) -> None:
    """Make a checkpoint of a plain DCP one; its tensors become those that `rename` says.

    DCP keeps no checksums: what is damaged there already stays so. Values that are no tensors
    go to `extra["values"]`, by name, as JSON.
    """
    source = Path(source)
    path = source / METADATA
    data = read_whole(path, _MAX_METADATA_BYTES)
    try:
        metadata = unpickle_metadata(data)
        with _Items(source, metadata) as items:
            _convert(items, metadata, Path(folder), rename, progress)
    except (CheckpointError, UsageError, AttributeError, TypeError) as error:
        # Fields of a hostile pickle may be of any type.
        raise CheckpointError(f"{source}: {error}") from error


class _Items(ExitStack):
    """Reads the items of a DCP checkpoint, each checked to lie in a file of its folder."""

    def __init__(self, folder: Path, metadata: Record) -> None:
        super().__init__()
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._num_read: dict[str, int] = defaultdict(int)
        self._where: dict[_Key, Record] = {}
        for index, info in _mapping(metadata["storage_data"]).items():
            offset = index.get("offset")
            self._where[_text(index["fqn"]), None if offset is None else _ints(offset)] = info

    def __contains__(self, key: _Key) -> bool:
        return key in self._where

    def read(self, name: str, offsets: tuple[int, ...] | None) -> Any:
        """Give the tensor or the value that is stored under a name, at its offsets."""
        info = self._where.get((name, offsets))
        if info is None:
            raise CheckpointError(f"{name!r} at {offsets} is not in any file")
        file_name = file_names.DCP.check(info["relative_path"])
        start, length = info["offset"], info["length"]
        if info.get("transform_descriptors"):
            raise NotImplementedError(
                f"{file_name}: DCP checkpoints with transforms are not supported"
            )
        file = self._file(file_name)
        size = os.fstat(file.fileno()).st_size
        is_whole = type(start) is int and type(length) is int
        if not is_whole or not 0 <= start <= start + length <= size:
            raise CheckpointError(
                f"{file_name}: {name!r} should be {length!r:.30} bytes from {start!r:.30} on, "
                f"and the file has {size:,}"
            )
        # Else a small file could be shown again and again, as tensors of any size.
        self._num_read[file_name] += length
        if self._num_read[file_name] > size:
            raise CheckpointError(f"{file_name}: its {size:,} bytes are listed more than once")
        try:
            return read_item(os.pread(file.fileno(), length, start))
        except CheckpointError as error:
            raise CheckpointError(f"{file_name}: {name!r}: {error}") from error

    def _file(self, name: str) -> BinaryIO:
        if name not in self._files:
            with disk_errors("read", self._folder / name):
                self._files[name] = self.enter_context(open_regular(self._folder / name))
        return self._files[name]


def _convert(
    items: _Items,
    metadata: Record,
    folder: Path,
    rename: Callable[[str], str],
    progress: Progress | None,
) -> None:
    outlines: dict[str, Share] = {}
    values: dict[str, JSON] = {}
    blocks: list[Block] = []
    for name, entry in _mapping(metadata["state_dict_metadata"]).items():
        _text(name)
        if not is_record(entry, "TensorStorageMetadata"):
            values[name] = items.read(name, None)
            check_json(values[name], f"the value {name!r}")
            continue
        new_name = rename(name)
        if new_name in outlines:
            raise UsageError(f"`rename` gives two tensors the name {new_name!r}")
        outlines[new_name] = outline(_ints(entry["size"]), _dtype(name, entry), "from DCP")
        blocks += _blocks(items, name, new_name, entry, progress)
    write_offline(folder, outlines, [blocks], {"values": values} if values else {})


def _blocks(
    items: _Items, name: str, new_name: str, entry: Record, progress: Progress | None
) -> Iterator[Block]:
    dtype = _dtype(name, entry)
    seen: set[tuple[int, ...]] = set()
    for chunk in entry["chunks"]:
        region = Region(offsets=_ints(chunk["offsets"]), sizes=_ints(chunk["sizes"]))
        if not region.numel:
            continue
        # A short pickle can list one chunk without end; the files hold each once.
        if region.offsets in seen or (name, region.offsets) not in items:
            raise CheckpointError(f"{name!r} at {region.offsets} is listed twice, or in no file")
        seen.add(region.offsets)

        def read(region: Region = region) -> torch.Tensor:
            values = items.read(name, region.offsets)
            is_tensor = isinstance(values, torch.Tensor)
            found = (values.dtype, tuple(values.shape)) if is_tensor else type(values).__name__
            if found != (dtype, region.sizes):
                raise CheckpointError(
                    f"{name!r} at {region.offsets} should be {dtype} {region.sizes}, got {found}"
                )
            if progress is not None:
                progress(values.nbytes)
            return values

        yield Block(name=new_name, region=region, dtype=dtype, read=read)


def _dtype(name: str, entry: Record) -> torch.dtype:
    """The dtype of a tensor, which comes first in the state of its properties."""
    state = entry["properties"].state
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype) or dtype not in CODES:
        raise CheckpointError(f"{name!r} has a dtype that is not supported: {dtype!r:.50}")
    return dtype


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"expected a name in the metadata, got a {type(value).__name__}")
    return value


def _ints(value: object) -> tuple[int, ...]:
    items = value if isinstance(value, tuple) and len(value) <= _MAX_DIMS else None
    if items is None or any(type(item) is not int or not 0 <= item < 2**63 for item in items):
        raise CheckpointError(f"expected sizes or offsets in the metadata, got {value!r:.100}")
    return items


def _mapping(value: object) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"expected a table in the metadata, got a {type(value).__name__}")
    return value

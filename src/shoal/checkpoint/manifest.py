"""`manifest.json`: the metadata of a checkpoint as text, guarded by a checksum of its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypeVar

import torch

from shoal.checkpoint.disk import disk_errors, write_synced
from shoal.checkpoint.metadata import Manifest, StoredRegion, TensorEntry
from shoal.checkpoint.storage import CODES
from shoal.errors import CheckpointError, UsageError
from shoal.layout.region import Region

NAME = "manifest.json"
FORMAT = "shoal-checkpoint"
VERSION = 1

MAX_BYTES = 1 << 30
"""A longer manifest is refused unread: no checkpoint of ours comes near it."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}

T = TypeVar("T")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a checkpoint's folder, through to the disk."""
    content = _encode(manifest)
    text = json.dumps({**content, "checksum": _checksum(content)}, allow_nan=False)
    write_synced(folder / NAME, [text.encode()])


def read_manifest(folder: Path) -> Manifest:
    """Read a checkpoint's manifest; raises CheckpointError unless all of it is as written."""
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(_absence(folder))
    with disk_errors("read", path):
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_BYTES:,} bytes: not a manifest")
        data = path.read_bytes()
    try:
        return _decode(_parse(data))
    except (CheckpointError, UsageError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def fingerprint(manifest: Manifest) -> str:
    """Give a short text that two manifests share only if they say the same."""
    return _checksum(_encode(manifest))


def _absence(folder: Path) -> str:
    if not folder.exists():
        return f"there is no checkpoint {folder}: the folder does not exist"
    if not folder.is_dir():
        return f"{folder} is a file; a checkpoint is a folder with a {NAME}"
    return (
        f"{folder} is not a complete checkpoint: it holds no {NAME}. "
        "Load an earlier one, and delete this one"
    )


def _encode(manifest: Manifest) -> dict[str, object]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "world_size": manifest.world_size,
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": str(entry.dtype).removeprefix("torch."),
                "regions": [
                    {
                        "file": stored.file,
                        "key": stored.key,
                        "offsets": list(stored.region.offsets),
                        "sizes": list(stored.region.sizes),
                        "crc32": stored.crc32,
                    }
                    for stored in entry.regions
                ],
            }
            for name, entry in manifest.tensors.items()
        },
        "extra": manifest.extra,
    }


def _checksum(content: dict[str, object]) -> str:
    """Hash the content in a form that does not depend on spaces or on the order of keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _parse(data: bytes) -> dict[str, object]:
    """Read JSON that says nothing twice, is ours, of this version, and undamaged."""
    try:
        content = json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not readable as JSON ({error}). {_DAMAGED}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"not a manifest of a shoal checkpoint: no format {FORMAT!r} in it")
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"format version {content.get('version')!r}, but this shoal reads version {VERSION}. "
            "Load it with the version of shoal that wrote it"
        )
    checksum = content.pop("checksum", None)
    if checksum != _checksum(content):
        raise CheckpointError(f"the manifest does not match its checksum. {_DAMAGED}")
    return content


_DAMAGED = "The file is damaged: copy the checkpoint anew, or load an earlier one"


def _decode(content: dict[str, object]) -> Manifest:
    tensors: dict[str, TensorEntry] = {}
    for name, fields in _take(content, "tensors", dict).items():
        try:
            tensors[name] = _entry(fields)
        except (CheckpointError, UsageError) as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from error
    return Manifest(
        world_size=_take(content, "world_size", int),
        tensors=tensors,
        extra=_take(content, "extra", dict),
    )


def _entry(fields: object) -> TensorEntry:
    dtype = _take(fields, "dtype", str)
    return TensorEntry(
        shape=_sizes(fields, "shape"),
        dtype=_dtype(dtype),
        regions=tuple(_stored(item) for item in _take(fields, "regions", list)),
    )


def _stored(fields: object) -> StoredRegion:
    return StoredRegion(
        file=_take(fields, "file", str),
        key=_take(fields, "key", str),
        region=Region(offsets=_sizes(fields, "offsets"), sizes=_sizes(fields, "sizes")),
        crc32=_take(fields, "crc32", int),
    )


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise CheckpointError(f"unknown dtype {name!r}; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _sizes(fields: object, key: str) -> tuple[int, ...]:
    values = _take(fields, key, list)
    for value in values:
        if type(value) is not int or not 0 <= value < 2**63:
            raise CheckpointError(f"{key} should be whole numbers of 0 or more, got {values!r}")
    return tuple(values)


def _take(fields: object, key: str, kind: type[T]) -> T:
    if not isinstance(fields, dict):
        raise CheckpointError(f"expected an object, got {type(fields).__name__}")
    value = fields.get(key)
    # `type is`, because True is an int to isinstance.
    if type(value) is not kind:
        raise CheckpointError(f"expected {key!r} of type {kind.__name__}, got {value!r}")
    return value


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("the same key twice in one object")
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

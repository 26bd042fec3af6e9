"""`manifest.json`: the metadata of a checkpoint as text, guarded by a checksum of its own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TypeVar

import torch

from shoal.checkpoint.checksum import Checksum
from shoal.checkpoint.disk import Folder, read_whole, write_synced
from shoal.checkpoint.metadata import Manifest, StoredFile, StoredRegion, TensorEntry
from shoal.checkpoint.storage import CODES
from shoal.checkpoint.strict_json import check_size, strict_json
from shoal.errors import CheckpointError, UsageError
from shoal.layout.region import Region

NAME = "manifest.json"
FORMAT = "shoal-checkpoint"
VERSION = 3

_PLAIN_VERSION = 2
"""Before there were other checksums than plain ones; the same in everything else."""

MAX_BYTES = 1 << 28
"""A longer manifest is refused unread: no checkpoint of ours comes near it."""

_MAX_DIMS = 64

_KEYS = (
    *("shape", "dtype", "layout", "regions", "file", "start", "offsets", "sizes", "crc32"),
    *("bytes", "header_bytes", "header_crc32"),
)
"""Of the objects that a manifest has many of."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}

T = TypeVar("T")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest into a checkpoint's folder, through to the disk."""
    data = sealed(encoded(manifest))
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            f"the manifest of {folder} would have {len(data):,} bytes, and {MAX_BYTES:,} is the "
            "most that is read back: save fewer tensors in one checkpoint"
        )
    try:
        check_size(data, _KEYS)
    except ValueError as error:
        raise CheckpointError(
            f"the manifest of {folder} would not be read back: {error}. "
            "Save large tables as tensors, not in `extra`"
        ) from error
    write_synced(folder / NAME, [data], len(data))


def read_manifest(folder: Folder) -> Manifest:
    """Read a checkpoint's manifest; raises CheckpointError unless all of it is as written."""
    folder = Path(folder)
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(_absence(folder))
    data = read_whole(path, MAX_BYTES)
    try:
        return _decode(_parse(data))
    except (CheckpointError, UsageError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def sealed(content: dict[str, object]) -> bytes:
    """Give the content as text, with a checksum at its end of every byte before it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    body = text[:-1].encode()
    return body + _seal(body)


def fingerprint(manifest: Manifest) -> str:
    """Give a short text that two manifests share only if they say the same."""
    return hashlib.blake2b(sealed(encoded(manifest)), digest_size=16).hexdigest()


def _absence(folder: Path) -> str:
    if not folder.exists():
        return f"there is no checkpoint {folder}: the folder does not exist"
    if not folder.is_dir():
        return f"{folder} is a file; a checkpoint is a folder with a {NAME}"
    if any(folder.glob("rank-*.safetensors")):
        return (
            f"{folder} is not a complete checkpoint: it holds no {NAME}. "
            "Copy it anew, or load an earlier one"
        )
    return f"{folder} is not a checkpoint: it holds no {NAME}"


def encoded(manifest: Manifest) -> dict[str, object]:
    """Give what a manifest says as values that JSON can hold."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "world_size": manifest.world_size,
        "files": {name: encoded_file(file) for name, file in manifest.files.items()},
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": str(entry.dtype).removeprefix("torch."),
                "layout": entry.layout,
                "regions": [encoded_region(stored) for stored in entry.regions],
            }
            for name, entry in manifest.tensors.items()
        },
        "extra": manifest.extra,
        "checksums": manifest.checksum.value,
    }


def encoded_file(file: StoredFile) -> dict[str, object]:
    """Give a file's entry as values that JSON can hold."""
    return {
        "bytes": file.num_bytes,
        "header_bytes": file.header_bytes,
        "header_crc32": file.header_crc32,
    }


def encoded_region(stored: StoredRegion) -> dict[str, object]:
    """Give a region's entry as values that JSON can hold."""
    return {
        "file": stored.file,
        "start": stored.start,
        "offsets": list(stored.region.offsets),
        "sizes": list(stored.region.sizes),
        "crc32": stored.crc32,
    }


def _seal(body: bytes) -> bytes:
    return b',"checksum":"%s"}' % hashlib.blake2b(body, digest_size=16).hexdigest().encode()


_SEAL_BYTES = len(_seal(b""))


def _parse(data: bytes) -> dict[str, object]:
    """Read JSON that says nothing twice, is ours, of this version, and undamaged."""
    try:
        content = strict_json(data, _KEYS)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not readable as JSON ({error}). {_DAMAGED}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"not a manifest of a shoal checkpoint: no format {FORMAT!r} in it")
    if content.get("version") not in (_PLAIN_VERSION, VERSION):
        raise CheckpointError(
            f"format version {content.get('version')!r}, but this shoal reads versions "
            f"{_PLAIN_VERSION} and {VERSION}. Load it with the version of shoal that wrote it"
        )
    if data[-_SEAL_BYTES:] != _seal(data[:-_SEAL_BYTES]):
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
        files={
            name: decoded_file(fields) for name, fields in _take(content, "files", dict).items()
        },
        tensors=tensors,
        extra=_take(content, "extra", dict),
        checksum=_checksum(content),
    )


def _checksum(content: dict[str, object]) -> Checksum:
    if content["version"] == _PLAIN_VERSION:
        return Checksum.PLAIN
    name = _take(content, "checksums", str)
    try:
        return Checksum(name)
    except ValueError as error:
        known = ", ".join(kind.value for kind in Checksum)
        raise CheckpointError(f"unknown checksums {name!r}; known are {known}") from error


def _entry(fields: object) -> TensorEntry:
    dtype = _take(fields, "dtype", str)
    return TensorEntry(
        shape=_sizes(fields, "shape"),
        dtype=_dtype(dtype),
        regions=tuple(decoded_region(item) for item in _take(fields, "regions", list)),
        layout=_take(fields, "layout", str),
    )


def decoded_file(fields: object) -> StoredFile:
    """Read what `encoded_file` gave."""
    return StoredFile(
        num_bytes=_take(fields, "bytes", int),
        header_bytes=_take(fields, "header_bytes", int),
        header_crc32=_take(fields, "header_crc32", int),
    )


def decoded_region(fields: object) -> StoredRegion:
    """Read what `encoded_region` gave."""
    return StoredRegion(
        file=_take(fields, "file", str),
        start=_take(fields, "start", int),
        region=Region(offsets=_sizes(fields, "offsets"), sizes=_sizes(fields, "sizes")),
        crc32=_take(fields, "crc32", int),
    )


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise CheckpointError(f"unknown dtype {name!r}; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _sizes(fields: object, key: str) -> tuple[int, ...]:
    values = _take(fields, key, list)
    if len(values) > _MAX_DIMS:
        raise CheckpointError(f"{key} has {len(values):,} numbers, and a tensor {_MAX_DIMS} dims")
    for value in values:
        if type(value) is not int or not 0 <= value < 2**63:
            raise CheckpointError(
                f"{key} should be whole numbers of 0 or more, got {values!r:.200}"
            )
    return tuple(values)


def _take(fields: object, key: str, kind: type[T]) -> T:
    if not isinstance(fields, dict):
        raise CheckpointError(f"expected an object, got {type(fields).__name__}")
    value = fields.get(key)
    # `type is`, because True is an int to isinstance.
    if type(value) is not kind:
        raise CheckpointError(f"expected {key!r} of type {kind.__name__}, got {value!r:.200}")
    return value

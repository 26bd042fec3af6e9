"""The manifest of a checkpoint's tensors: values that cannot be inconsistent, and their text.

    Manifest
    ├── StoredFile         one file: its length, and the checksum of its header
    └── TensorEntry        one tensor: its whole shape, its dtype, how it was laid out
        └── StoredRegion   one rectangle of it: which file, at which byte, with which checksum

The regions of a tensor cover it. A region is the unit of writing, of checking and of reading.
`manifest.json` holds all of it as JSON, guarded by a checksum of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import torch

from shoal.checkpoint.checksum import Checksum
from shoal.checkpoint.disk import Folder, checkpoint_at
from shoal.checkpoint.storage import Checkpoint, FileNames
from shoal.checkpoint.untrusted import check_size, strict_json
from shoal.errors import CheckpointError, UsageError
from shoal.layout.region import Region

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""The values that `extra` may hold, at any depth; numbers are finite."""

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The dtypes that a checkpoint can hold, as safetensors calls them."""

MAX_HEADER_BYTES = 100_000_000
"""A longer header is refused unread, by us as by other readers of safetensors."""

DATA_FILES = FileNames(
    pattern=re.compile(r"rank-[0-9]{5,9}\.safetensors"), example="rank-00000.safetensors"
)

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

T = TypeVar("T")


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as a manifest does."""
    return str(dtype).removeprefix("torch.")


_DTYPES = {dtype_name(dtype): dtype for dtype in CODES}
_CHECKSUMS = {kind.value: kind for kind in Checksum}


def file_name(rank: int) -> str:
    """Name the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A data file: how long it is, and what guards the part of it that is no data."""

    num_bytes: int
    header_bytes: int
    header_crc32: int

    def __post_init__(self) -> None:
        if not 8 <= self.header_bytes <= min(self.num_bytes, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"a file of {self.num_bytes:,} bytes cannot have a header of {self.header_bytes:,}"
            )
        _check_crc32(self.header_crc32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRegion:
    """A rectangle of a tensor's elements in a file, from byte `start` on."""

    name: str
    """Of the tensor."""
    dtype: torch.dtype
    file: str
    start: int
    region: Region
    crc32: int

    def __post_init__(self) -> None:
        DATA_FILES.check(self.file)
        _check_crc32(self.crc32)
        if self.region.numel == 0:
            raise CheckpointError(f"a stored region has elements, got {self.region}")

    @property
    def num_bytes(self) -> int:
        """How many bytes the region takes in the file."""
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as a whole, and where its parts are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[StoredRegion, ...]
    layout: str = ""
    """How it was laid out over the ranks that saved it, for people to read."""

    def __post_init__(self) -> None:
        if math.prod(max(1, size) for size in self.shape) * self.dtype.itemsize >= 2**63:
            raise CheckpointError(f"shape {self.shape} is larger than a tensor can be")
        whole = Region.whole(self.shape)
        for stored in self.regions:
            if len(stored.region.sizes) != len(self.shape) or not whole.contains(stored.region):
                raise CheckpointError(f"{stored.region} is not inside shape {self.shape}")
        # Hostile regions may overlap: who loads checks those that it needs.
        # Regions of one tensor are disjoint as they are written, so their sizes add up to it.
        covered = sum(stored.region.numel for stored in self.regions)
        if covered != math.prod(self.shape):
            raise CheckpointError(
                f"the regions hold {covered:,} elements, but shape {self.shape} has "
                f"{math.prod(self.shape):,}"
            )

    @property
    def num_bytes(self) -> int:
        """How many bytes the whole tensor has."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a checkpoint holds, and the values that were saved beside the tensors."""

    world_size: int
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, TensorEntry]
    extra: Mapping[str, JSON]
    checksum: Checksum = Checksum.FOLDED
    """How the checksums of the regions were taken."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise CheckpointError(f"expected a world size of 1 or more, got {self.world_size}")
        # All of them, not only those that regions name: `verify` opens each.
        for name in self.files:
            DATA_FILES.check(name)
        held = dict.fromkeys(self.files, 0)
        for entry in self.tensors.values():
            for stored in entry.regions:
                self._check_inside(stored)
                held[stored.file] += stored.num_bytes
        # Else a small file could be shown again and again, as tensors of any size.
        for name, file in self.files.items():
            if held[name] > file.num_bytes - file.header_bytes:
                raise CheckpointError(
                    f"the regions in {name!r} have {held[name]:,} bytes, and its data "
                    f"{file.num_bytes - file.header_bytes:,}: some bytes are listed twice"
                )

    @property
    def num_bytes(self) -> int:
        """How many bytes all tensors have together."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    def _check_inside(self, stored: StoredRegion) -> None:
        file = self.files.get(stored.file)
        stop = stored.start + stored.num_bytes
        if file is None or not file.header_bytes <= stored.start < stop <= file.num_bytes:
            raise CheckpointError(
                f"tensor {stored.name!r}: bytes [{stored.start}, {stop}) of {stored.file!r} are "
                "not data of any file in the list"
            )


def _check_crc32(value: int) -> None:
    if not 0 <= value < 2**32:
        raise CheckpointError(f"expected a checksum of 32 bits, got {value}")


def check_json(value: object, where: str = "extra") -> None:
    """Raise CheckpointError, naming the place, unless JSON gives the value back as it is."""
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CheckpointError(f"{where} is {value}, which JSON cannot hold; leave it out")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; JSON needs strings as keys")
            check_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_json(item, f"{where}[{index}]")
    else:
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which JSON cannot hold; "
            "pass tensors by name in `tensors`, and other things as numbers and strings"
        )


def write_manifest(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Write the manifest of a partial checkpoint, so that it would survive a crash."""
    data = sealed(encoded(manifest))
    if len(data) > MAX_BYTES:
        raise CheckpointError(
            f"the manifest of {checkpoint} would have {len(data):,} bytes, and {MAX_BYTES:,} is "
            "the most that is read back: save fewer tensors in one checkpoint"
        )
    try:
        check_size(data, _KEYS)
    except ValueError as error:
        raise CheckpointError(
            f"the manifest of {checkpoint} would not be read back: {error}. "
            "Save large tables as tensors, not in `extra`"
        ) from error
    checkpoint.write(NAME, [data], len(data))


def read_manifest(folder: Folder | Checkpoint) -> Manifest:
    """Read a checkpoint's manifest; raises CheckpointError unless all of it is as written."""
    checkpoint = checkpoint_at(folder)
    if not checkpoint.exists(NAME):
        raise CheckpointError(_absence(checkpoint))
    data = checkpoint.read_whole(NAME, MAX_BYTES)
    try:
        return _decode(_parse(data))
    except (CheckpointError, UsageError) as error:
        raise CheckpointError(f"{checkpoint.locate(NAME)}: {error}") from error


def sealed(content: dict[str, object]) -> bytes:
    """Give the content as text, with a checksum at its end of every byte before it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    body = text[:-1].encode()
    return body + _seal(body)


def fingerprint(manifest: Manifest) -> str:
    """Give a short text that two manifests share only if they say the same."""
    return hashlib.blake2b(sealed(encoded(manifest)), digest_size=16).hexdigest()


def _absence(checkpoint: Checkpoint) -> str:
    if not checkpoint.exists():
        return f"there is no checkpoint {checkpoint}: the folder does not exist"
    try:
        files = checkpoint.storage.names(checkpoint.name)
    except NotADirectoryError:
        return f"{checkpoint} is a file; a checkpoint is a folder with a {NAME}"
    except OSError:
        files = []
    if any(DATA_FILES.pattern.fullmatch(file) for file in files):
        return (
            f"{checkpoint} is not a complete checkpoint: it holds no {NAME}. "
            "Copy it anew, or load an earlier one"
        )
    return f"{checkpoint} is not a checkpoint: it holds no {NAME}"


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
                "dtype": dtype_name(entry.dtype),
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
            tensors[name] = _entry(name, fields)
        except (CheckpointError, UsageError) as error:
            raise CheckpointError(f"tensor {name!r}: {error}") from error
    return Manifest(
        world_size=_take(content, "world_size", int),
        files={
            name: decoded_file(fields) for name, fields in _take(content, "files", dict).items()
        },
        tensors=tensors,
        extra=_take(content, "extra", dict),
        checksum=Checksum.PLAIN
        if content["version"] == _PLAIN_VERSION
        else _known("checksums", _take(content, "checksums", str), _CHECKSUMS),
    )


def _entry(name: str, fields: object) -> TensorEntry:
    dtype = _take(fields, "dtype", str)
    return TensorEntry(
        shape=_sizes(fields, "shape"),
        dtype=_known("dtype", dtype, _DTYPES),
        regions=tuple(decoded_region(name, dtype, f) for f in _take(fields, "regions", list)),
        layout=_take(fields, "layout", str),
    )


def decoded_file(fields: object) -> StoredFile:
    """Read what `encoded_file` gave."""
    return StoredFile(
        num_bytes=_take(fields, "bytes", int),
        header_bytes=_take(fields, "header_bytes", int),
        header_crc32=_take(fields, "header_crc32", int),
    )


def decoded_region(name: str, dtype: str, fields: object) -> StoredRegion:
    """Read what `encoded_region` gave of a tensor with that `dtype_name`."""
    return StoredRegion(
        name=name,
        dtype=_known("dtype", dtype, _DTYPES),
        file=_take(fields, "file", str),
        start=_take(fields, "start", int),
        region=Region(offsets=_sizes(fields, "offsets"), sizes=_sizes(fields, "sizes")),
        crc32=_take(fields, "crc32", int),
    )


def _known(what: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise CheckpointError(f"unknown {what} {name!r}; known are {', '.join(table)}")
    return table[name]


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

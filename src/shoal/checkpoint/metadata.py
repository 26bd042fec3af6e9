"""What a checkpoint says about its tensors: values that cannot be built inconsistent.

    Manifest
    ├── StoredFile         one file: its length, and the checksum of its header
    └── TensorEntry        one tensor: its whole shape, its dtype, how it was laid out
        └── StoredRegion   one rectangle of it: which file, at which byte, with which checksum

The regions of a tensor cover it. A region is the unit of writing, of checking and of reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from shoal.checkpoint import file_names
from shoal.checkpoint.checksum import Checksum
from shoal.errors import CheckpointError
from shoal.layout.region import Region

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""What `extra` may hold, at any depth; numbers are finite."""

MAX_HEADER_BYTES = 100_000_000
"""A longer header is refused unread, by us as by other readers of safetensors."""


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

    file: str
    start: int
    region: Region
    crc32: int

    def __post_init__(self) -> None:
        file_names.OURS.check(self.file)
        _check_crc32(self.crc32)
        if self.region.numel == 0:
            raise CheckpointError(f"a stored region has elements, got {self.region}")


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
            file_names.OURS.check(name)
        held = dict.fromkeys(self.files, 0)
        for name, entry in self.tensors.items():
            for stored in entry.regions:
                self._check_inside(name, entry, stored)
                held[stored.file] += stored.region.numel * entry.dtype.itemsize
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

    def _check_inside(self, name: str, entry: TensorEntry, stored: StoredRegion) -> None:
        file = self.files.get(stored.file)
        stop = stored.start + stored.region.numel * entry.dtype.itemsize
        if file is None or not file.header_bytes <= stored.start < stop <= file.num_bytes:
            raise CheckpointError(
                f"tensor {name!r}: bytes [{stored.start}, {stop}) of {stored.file!r} are not data "
                f"of any file in the list"
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

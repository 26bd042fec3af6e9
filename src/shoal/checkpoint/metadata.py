"""What a checkpoint says about its tensors: values that cannot be built inconsistent.

    Manifest
    └── TensorEntry        one tensor: its whole shape, its dtype
        └── StoredRegion   one rectangle of it: which file, under which key, with which checksum

The regions of a tensor cover it. A region is the unit of writing, of checking and of reading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from shoal.errors import CheckpointError
from shoal.layout.region import Region

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""What `extra` may hold, at any depth; numbers are finite."""

_FILE_NAME = re.compile(r"rank-\d{5,}\.safetensors")


def file_name(rank: int) -> str:
    """Name the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRegion:
    """A rectangle of a tensor's elements in a file."""

    file: str
    key: str
    region: Region
    crc32: int

    def __post_init__(self) -> None:
        # The name becomes part of a path: one that could leave the folder is refused here.
        if not _FILE_NAME.fullmatch(self.file):
            raise CheckpointError(f"expected a file name like {file_name(0)}, got {self.file!r}")
        if not 0 <= self.crc32 < 2**32:
            raise CheckpointError(f"expected a checksum of 32 bits, got {self.crc32}")
        if self.region.numel == 0:
            raise CheckpointError(f"a stored region has elements, got {self.region}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor as a whole, and where its parts are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    regions: tuple[StoredRegion, ...]

    def __post_init__(self) -> None:
        whole = Region.whole(self.shape)
        for stored in self.regions:
            if len(stored.region.sizes) != len(self.shape) or not whole.contains(stored.region):
                raise CheckpointError(f"{stored.region} is not inside shape {self.shape}")
        # Regions of one tensor are disjoint as they are written, so their sizes add up to it.
        covered = sum(stored.region.numel for stored in self.regions)
        if covered != math.prod(self.shape):
            raise CheckpointError(
                f"the regions hold {covered:,} elements, but shape {self.shape} has "
                f"{math.prod(self.shape):,}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a checkpoint holds, and the values that were saved beside the tensors."""

    world_size: int
    tensors: Mapping[str, TensorEntry]
    extra: Mapping[str, JSON]

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise CheckpointError(f"expected a world size of 1 or more, got {self.world_size}")


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

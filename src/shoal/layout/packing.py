"""A packing: which rank holds which region of each parameter, at which byte of its buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import torch

from shoal.errors import UsageError
from shoal.layout.piece import Piece
from shoal.layout.region import Region
from shoal.layout.spec import ParamSpec
from shoal.layout.stripe import Stripe


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing(ABC):
    """Parameters laid out over ranks whose shard buffers all have `shard_bytes` bytes.

    The buffers consist of sections, the same on all ranks, and of each section all ranks' bytes lie
    one after another in the gathered buffer. Most packings have one section. Every answer is
    arithmetic on one parameter; none walks the ranks.
    """

    params: tuple[ParamSpec, ...]
    world_size: int
    shard_bytes: int

    def __post_init__(self) -> None:
        check_packable(self.params, self.world_size)
        step = shard_step_bytes(self.params)
        if self.shard_bytes < 0 or self.shard_bytes % step != 0:
            raise UsageError(f"expected shard_bytes in steps of {step}, got {self.shard_bytes}")

    @property
    def gathered_bytes(self) -> int:
        """The size of all ranks' buffers together."""
        return self.world_size * self.shard_bytes

    @property
    def sections(self) -> tuple[range, ...]:
        """The bytes of a shard buffer that are gathered together, and reduced together."""
        return (range(self.shard_bytes),)

    def section_of(self, index: int) -> range:
        """The section that has parameter `index`."""
        return self.sections[0]

    def in_sections(self) -> Packing:
        """The same regions, in as many sections as make gathered bytes full parameters."""
        return self

    def in_one_section(self) -> Packing:
        """The same bytes on every rank, in one section."""
        return self

    @property
    def padding_bytes(self) -> int:
        """The part of the gathered buffer that holds no element."""
        return self.gathered_bytes - sum(param.nbytes for param in self.params)

    @abstractmethod
    def piece(self, index: int, rank: int) -> Piece:
        """The piece of parameter `index` that a rank holds."""

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that a rank holds, one of each parameter."""
        return tuple(self.piece(index, rank) for index in range(len(self.params)))

    @abstractmethod
    def holders(self, index: int, region: Region) -> range:
        """The ranks that may hold an element of the region; no other rank does."""

    @abstractmethod
    def stripes(self, index: int) -> tuple[Stripe, ...]:
        """All ranks' pieces of a parameter in its section, as at most three strided blocks."""

    @abstractmethod
    def gathered_offset(self, index: int) -> int | None:
        """At which byte of the gathered buffer the parameter lies in one run, if it does."""

    def is_zero_copy(self, index: int) -> bool:
        """Whether a view of the gathered buffer is the full parameter."""
        return self.gathered_offset(index) is not None

    @abstractmethod
    def standing_for(self, params: Sequence[ParamSpec]) -> Packing:
        """The packing of tensors that stand for these parameters: every rank keeps its regions.

        Each has as many elements as its parameter, or one for every k of them, such as a scale for
        each block; then all cuts must lie between those k. Or it has none.
        """

    def with_dtypes(self, dtypes: Sequence[torch.dtype]) -> Self:
        """The packing of the same parameters in other dtypes.

        Mixed precision needs it: what is stored in fp32, gathered in bf16 and reduced in fp32
        must be cut at the same elements each time.
        """
        self._check_one_each("dtypes", dtypes)
        recast = [replace(p, dtype=dtype) for p, dtype in zip(self.params, dtypes, strict=True)]
        return cast(Self, self.standing_for(recast))

    def _param(self, index: int) -> ParamSpec:
        if not 0 <= index < len(self.params):
            raise UsageError(f"parameter {index} does not exist: there are {len(self.params)}")
        return self.params[index]

    def _check_region(self, index: int, region: Region) -> None:
        param = self._param(index)
        if not Region.whole(param.shape).contains(region):
            raise UsageError(f"{region} is not inside parameter {param.name!r} of {param.shape}")

    def _check_one_each(self, what: str, values: Sequence[object]) -> None:
        if len(values) != len(self.params):
            raise UsageError(
                f"expected one of {what} for each of {len(self.params)} parameters, "
                f"got {len(values)}"
            )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise UsageError(f"rank {rank} does not exist: the world has {self.world_size}")


def check_packable(params: Sequence[ParamSpec], world_size: int) -> None:
    """Refuse a world with no rank, or two parameters of one name."""
    if world_size < 1:
        raise UsageError(f"expected a world of 1 rank or more, got {world_size}")
    names = [param.name for param in params]
    if len(set(names)) != len(names):
        double = sorted({name for name in names if names.count(name) > 1})
        raise UsageError(f"parameters to be packed together need different names, twice: {double}")


def shard_step_bytes(params: Sequence[ParamSpec]) -> int:
    """The unit of shard sizes, by which every rank's buffer starts aligned."""
    return max((param.align_bytes for param in params), default=1)

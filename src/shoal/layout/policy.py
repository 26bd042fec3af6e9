"""The layouts: policies that say how parameters are cut, and pack them for a world.

The five policies take their one option by position too, since `Block(128)` leaves no doubt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.errors import UsageError
from shoal.layout.even import EvenPacking, pack_even
from shoal.layout.packing import Packing
from shoal.layout.ragged import RaggedPacking
from shoal.layout.spec import ParamSpec
from shoal.layout.stream import pack_stream
from shoal.layout.whole import WholePacking, pack_whole


class Layout(ABC):
    """How parameters that are communicated together are spread over ranks."""

    __slots__ = ()

    @abstractmethod
    def pack(self, params: Sequence[ParamSpec], world_size: int) -> Packing:
        """Place every parameter; the same on every rank, with no communication."""


@dataclass(frozen=True, slots=True)
class Even(Layout):
    """Every parameter cut along a dim into one chunk per rank, as a DTensor's `Shard(dim)` is.

    `dim` is one dim for all parameters, or one for each in their order. As anywhere in torch,
    a negative one counts from the last. A 0-d parameter lies on rank 0.
    """

    dim: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        dims = (self.dim,) if isinstance(self.dim, int) else self.dim
        if not isinstance(dims, tuple) or not all(type(dim) is int for dim in dims):
            raise UsageError(f"Even takes a dim or a tuple of dims, got {self.dim!r}")

    def pack(self, params: Sequence[ParamSpec], world_size: int) -> EvenPacking:
        """See `Layout.pack`."""
        dims = (self.dim,) * len(params) if isinstance(self.dim, int) else self.dim
        if len(dims) != len(params):
            raise UsageError(
                f"Even has {len(dims)} dims for {len(params)} parameters: give one for each"
            )
        dims = [_positive_dim(p, d) for p, d in zip(params, dims, strict=True)]
        return pack_even(params, dims, world_size)


@dataclass(frozen=True, slots=True)
class Flat(Layout):
    """Parameters one after another, cut at any element; a gather never needs a copy.

    Shards are rounded up to whole steps of 16 elements, which can leave the last ranks without
    any. With `spreads`, that is not done where it makes a shard larger by more than an eighth:
    such small parameters are spread over all ranks, and copied when they are gathered.
    """

    spreads: bool = field(default=False, repr=False)

    def pack(self, params: Sequence[ParamSpec], world_size: int) -> RaggedPacking:
        """See `Layout.pack`."""
        return pack_stream(params, [1] * len(params), world_size, spreads=self.spreads)


@dataclass(frozen=True, slots=True)
class Rows(Layout):
    """Parameters one after another, cut between rows: indices of dim 0."""

    def pack(self, params: Sequence[ParamSpec], world_size: int) -> RaggedPacking:
        """See `Layout.pack`."""
        quanta = [max(param.row_numel, 1) for param in params]
        return pack_stream(params, quanta, world_size, by_rows=True)


@dataclass(frozen=True, slots=True)
class Block(Layout):
    """Parameters one after another, each cut between blocks of `numel` of its elements."""

    numel: int

    def __post_init__(self) -> None:
        if type(self.numel) is not int or self.numel < 1:
            raise UsageError(f"Block takes the number of elements of a block, got {self.numel!r}")

    def pack(self, params: Sequence[ParamSpec], world_size: int) -> RaggedPacking:
        """See `Layout.pack`."""
        return pack_stream(params, [self.numel] * len(params), world_size)


@dataclass(frozen=True, slots=True)
class Whole(Layout):
    """Every parameter entirely on one rank, the ranks about equally full."""

    def pack(self, params: Sequence[ParamSpec], world_size: int) -> WholePacking:
        """See `Layout.pack`."""
        return pack_whole(params, world_size)


def _positive_dim(param: ParamSpec, dim: int) -> int:
    ndim = max(len(param.shape), 1)
    if not -ndim <= dim < ndim:
        raise UsageError(
            f"parameter {param.name!r} of shape {param.shape} cannot be cut along dim {dim}: "
            f"expected {-ndim} to {ndim - 1}"
        )
    return dim % ndim

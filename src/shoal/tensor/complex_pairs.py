"""Complex tensors as pairs of real numbers: what `torch.view_as_real` makes of a placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed import ProcessGroup

from shoal.layout.region import Region
from shoal.tensor.placement import Placement
from shoal.tensor.sharded import Handler, Op, ShardedTensor


@dataclass(frozen=True)
class ComplexPairs(Placement):
    """The placement of a complex tensor, with one more dim of two numbers that stay together."""

    shards_stand_alone: ClassVar[bool] = False

    whole: Placement

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            "shape": (*self.whole.shape, 2),
            "group": self.whole.group,
            "rank": self.whole.rank,
            "replica": self.whole.replica,
            "is_pinned": self.whole.is_pinned,
            "local_regions": tuple(tuple(map(_pair, each)) for each in self.whole.local_regions),
            "local_shapes": tuple((*shape, 2) for shape in self.whole.local_shapes),
            "local_devices": self.whole.local_devices,
        }
        vars(self).update(values)

    def __repr__(self) -> str:
        return f"{self.whole} as pairs of real numbers"

    def regions_of(self, rank: int) -> tuple[Region, ...]:
        """See `Placement.regions_of`."""
        return tuple(map(_pair, self.whole.regions_of(rank)))

    def holders(self, region: Region) -> Sequence[int]:
        """See `Placement.holders`."""
        return self.whole.holders(Region(offsets=region.offsets[:-1], sizes=region.sizes[:-1]))

    def agrees(self, other: Placement) -> bool:
        """See `Placement.agrees`."""
        return isinstance(other, ComplexPairs) and self.whole.agrees(other.whole)

    def on(self, device: torch.device) -> Placement:
        """See `Placement.on`."""
        return ComplexPairs(self.whole.on(device))

    def within(self, group: ProcessGroup) -> ComplexPairs:
        """See `Placement.within`."""
        return ComplexPairs(self.whole.within(group))

    def _refuse(self, device: object = None) -> NoReturn:
        raise NotImplementedError(
            "torch.view_as_real of a ShardedTensor has no shards of its own; use the complex tensor"
        )

    # Nobody saves a view, and torch's specs have no word for it.
    shards = own_shards = spec = without_group = _refuse


def _pair(region: Region) -> Region:
    return Region(offsets=(*region.offsets, 0), sizes=(*region.sizes, 2))


def _view_as_real(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    (tensor,) = args
    return ShardedTensor.of([op(local) for local in tensor.locals], ComplexPairs(tensor.placement))


def _view_as_complex(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    (tensor,) = args
    if not isinstance(tensor.placement, ComplexPairs):
        raise NotImplementedError(
            f"{op} of a ShardedTensor takes what torch.view_as_real gave, got {tensor.placement}"
        )
    return ShardedTensor.of([op(local) for local in tensor.locals], tensor.placement.whole)


HANDLERS: dict[str, Handler] = {
    "view_as_real.default": _view_as_real,
    "view_as_complex.default": _view_as_complex,
}

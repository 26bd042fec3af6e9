"""Two placements over different groups, as the group that has all of their ranks counts them.

    reshard ranks [0, 1, 2, 3] to [2, 3]: four ranks take part; two of them end up with nothing
    reshard ranks [2, 3] to [0, 1, 2, 3]: four ranks take part; two of them begin with nothing

A rank outside of the smaller group has a placement too, of listed shards, by which it holds
nothing; a layout's placement is known to the ranks of its group alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal.layout.parcel import Holding
from shoal.layout.region import Region
from shoal.tensor.placement import Placement


def common_group(source: Placement, target: Placement) -> ProcessGroup | None:
    """The group over which elements can go from one placement to the other.

    None on a rank that is in neither; where no group has all ranks, it raises.
    """
    first, second = _ranks(source.group), _ranks(target.group)
    if first == second or second is None:
        return source.group if first is not None else None
    if first is None:
        return target.group
    if {*second} <= {*first}:
        smaller, larger = target, source
    elif {*first} <= {*second}:
        smaller, larger = source, target
    else:
        raise NotImplementedError(
            f"a tensor over ranks {first} cannot be resharded to ranks {second}: neither group has "
            "all ranks of the other; reshard it over a group that has them all first"
        )
    if {*first} != {*second} and not smaller.shards_stand_alone:
        raise NotImplementedError(
            f"a tensor over ranks {first} cannot be resharded to ranks {second}: the ranks outside "
            f"of {_ranks(smaller.group)} have no part in a placement of a layout ({smaller}); use "
            "a placement of listed shards there, Listed.of_spec on all ranks of both groups"
        )
    return larger.group


def seen_from(group: ProcessGroup, placement: Placement) -> Holding:
    """A placement, with ranks as `group` counts them."""
    members, own = dist.get_process_group_ranks(group), _ranks(placement.group)
    if own == members:
        return placement
    # By the placement of a rank outside of its group, ranks are those of the world.
    inner = {rank: rank if own is None else own.index(rank) for rank in own or members}
    return _Seen(placement, [inner.get(rank) for rank in members])


class _Seen:
    """A holding whose ranks have other numbers; those without one hold nothing."""

    __slots__ = ("_inner", "_outer", "_placement")

    def __init__(self, placement: Placement, inner: Sequence[int | None]) -> None:
        self._placement = placement
        self._inner = inner
        self._outer = {number: rank for rank, number in enumerate(inner) if number is not None}

    def regions_of(self, rank: int) -> Sequence[Region]:
        """See `Holding.regions_of`."""
        number = self._inner[rank]
        return () if number is None else self._placement.regions_of(number)

    def holders(self, region: Region) -> Sequence[int]:
        """See `Holding.holders`."""
        return sorted(self._outer[number] for number in self._placement.holders(region))


def _ranks(group: object) -> list[int] | None:
    """The members' global ranks; None where this rank is not one of them."""
    return dist.get_process_group_ranks(group) if isinstance(group, ProcessGroup) else None

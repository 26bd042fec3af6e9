"""The whole packing: every parameter entirely on one rank, the ranks about equally full.

rank 0  | embedding - - - - - |     for optimizers that need all of a matrix at once;
rank 1  | w1 w1 w1 | w2 w2 w2 |     the gathered buffer has every parameter in one run
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.layout.packing import Packing, check_packable, shard_step_bytes
from shoal.layout.piece import Piece
from shoal.layout.region import Region
from shoal.layout.spec import ParamSpec, round_up
from shoal.layout.stripe import Stripe


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePacking(Packing):
    """Parameter i lies on rank `owners[i]`, from `offsets_bytes[i]` on."""

    owners: tuple[int, ...]
    offsets_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        Packing.__post_init__(self)
        self._check_one_each("owners", self.owners)
        self._check_one_each("offsets_bytes", self.offsets_bytes)
        ends: dict[int, int] = {}
        for param, owner, offset in zip(self.params, self.owners, self.offsets_bytes, strict=True):
            if not 0 <= owner < self.world_size:
                raise UsageError(f"parameter {param.name!r} has no owner in the world: {owner}")
            if offset < ends.get(owner, 0) or offset % param.align_bytes != 0:
                raise UsageError(f"parameter {param.name!r} cannot start at byte {offset}")
            ends[owner] = offset + param.nbytes
            if ends[owner] > self.shard_bytes:
                raise UsageError(f"parameter {param.name!r} does not fit in {self.shard_bytes}")

    def piece(self, index: int, rank: int) -> Piece:
        """See `Packing.piece`."""
        param = self._param(index)
        self._check_rank(rank)
        if rank != self.owners[index]:
            return Piece(offset_bytes=0, shape=(0, *param.shape[1:]), regions=())
        regions = (Region.whole(param.shape),) if param.numel > 0 else ()
        return Piece(offset_bytes=self.offsets_bytes[index], shape=param.shape, regions=regions)

    def holders(self, index: int, region: Region) -> range:
        """See `Packing.holders`: the owner."""
        self._check_region(index, region)
        owner = self.owners[index]
        return range(owner, owner + 1) if region.numel > 0 else range(0)

    def stripes(self, index: int) -> tuple[Stripe, ...]:
        """See `Packing.stripes`; there is one."""
        param = self._param(index)
        if param.numel == 0:
            return ()
        return (
            Stripe(
                first_rank=self.owners[index],
                num_ranks=1,
                shard_offset=self.offsets_bytes[index] // param.itemsize,
                full_offset=0,
                numel=param.numel,
            ),
        )

    def gathered_offset(self, index: int) -> int:
        """See `Packing.gathered_offset`; there always is one."""
        self._param(index)
        return self.owners[index] * self.shard_bytes + self.offsets_bytes[index]

    def standing_for(self, params: Sequence[ParamSpec]) -> WholePacking:
        """See `Packing.standing_for`."""
        self._check_one_each("params", params)
        return _lay_out(tuple(params), self.owners, self.world_size)


def pack_whole(params: Sequence[ParamSpec], world_size: int) -> WholePacking:
    """Deal parameters to ranks, the largest first, each to the rank with least so far."""
    check_packable(params, world_size)
    owners = [0] * len(params)
    # Ranks beyond the number of parameters get nothing, so the heap need not know them.
    loads = [(0, rank) for rank in range(min(world_size, len(params)))]
    for index in sorted(range(len(params)), key=lambda i: (-params[i].nbytes, i)):
        load, owners[index] = loads[0]
        load += round_up(params[index].nbytes, params[index].align_bytes)
        heapq.heapreplace(loads, (load, owners[index]))
    return _lay_out(tuple(params), tuple(owners), world_size)


def _lay_out(
    params: tuple[ParamSpec, ...], owners: tuple[int, ...], world_size: int
) -> WholePacking:
    """Put each rank's parameters one after another, in the order in which they are given."""
    ends: dict[int, int] = {}
    offsets_bytes = []
    for param, owner in zip(params, owners, strict=True):
        offset = round_up(ends.get(owner, 0), param.align_bytes)
        offsets_bytes.append(offset)
        ends[owner] = offset + param.nbytes
    return WholePacking(
        params=params,
        world_size=world_size,
        shard_bytes=round_up(max(ends.values(), default=0), shard_step_bytes(params)),
        owners=owners,
        offsets_bytes=tuple(offsets_bytes),
    )

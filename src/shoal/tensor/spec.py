"""How torch says that a tensor is cut: a spec, here the one that cuts a dim into chunks.

Specs and shard metadata are torch's own classes, so that torch's checkpoints and users' code know
them. Chunks alone have a class here: to shard with a spec must give our tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch import sharded
from shoal._torch.sharded import ShardingSpec, ShardMetadata

if TYPE_CHECKING:
    from shoal.tensor.sharded import ShardedTensor


class ChunkShardingSpec(sharded.ChunkShardingSpec):
    """A dim cut into as many equal chunks as there are placements, as `torch.chunk` cuts it."""

    def shard(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensor: Tensor, src_rank: int = 0, process_group: ProcessGroup | None = None
    ) -> ShardedTensor:
        """Deal out the tensor that rank `src_rank` of the group has: collective."""
        from shoal.tensor.gather import scatter

        return scatter(tensor, self, src_rank, process_group)

    def __eq__(self, other: object) -> bool:
        # The class that torch makes says the same.
        if not isinstance(other, sharded.ChunkShardingSpec):
            return NotImplemented
        return self.dim == other.dim and self.placements == other.placements


def spec_of(shards: list[ShardMetadata]) -> ShardingSpec:
    """The spec that would cut a tensor into such shards: chunks if they are equal, else a list."""
    return own_spec(sharded.inferred_spec(shards))


def own_spec(spec: ShardingSpec) -> ShardingSpec:
    """The same spec of a class whose `shard` gives our tensor."""
    if type(spec) is sharded.ChunkShardingSpec:
        return ChunkShardingSpec(spec.dim, [*spec.placements])
    return spec

"""The name of `torch.distributed._shard.sharding_spec.chunk_sharding_spec`."""

from shoal.tensor.spec import ChunkShardingSpec

__all__ = ["ChunkShardingSpec"]

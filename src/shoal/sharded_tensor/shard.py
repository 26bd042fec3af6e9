"""The names of `torch.distributed._shard.sharded_tensor.shard`: torch's own class."""

from shoal._torch.sharded import LocalShard as Shard
from shoal._torch.sharded import ShardMetadata

__all__ = ["Shard", "ShardMetadata"]

"""The names of `torch.distributed._shard.sharded_tensor.metadata`: torch's own classes."""

from shoal._torch.sharded import (
    MEM_FORMAT_ENCODING,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)

__all__ = ["MEM_FORMAT_ENCODING", "ShardMetadata", "ShardedTensorMetadata", "TensorProperties"]

"""The names of `torch.distributed._shard.sharded_tensor.utils` that code outside of torch uses."""

from shoal._torch.sharded import build_global_metadata, build_metadata_from_local_shards
from shoal._torch.sharded import parse_remote_device as _parse_and_validate_remote_device

__all__ = [
    "_parse_and_validate_remote_device",
    "build_global_metadata",
    "build_metadata_from_local_shards",
]

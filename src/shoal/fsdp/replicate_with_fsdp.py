"""The names of `torch.distributed._composable.replicate_with_fsdp`, on shoal's engine."""

from shoal.runtime.fully_shard import ReplicateModule, replicate

__all__ = ["ReplicateModule", "replicate"]

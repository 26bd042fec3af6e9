"""The names of `torch.distributed.fsdp.api`: torch's own values, which say what a wrapper does."""

from torch.distributed.fsdp import api
from torch.distributed.fsdp.api import *  # noqa: F403

__all__ = [*api.__all__]

"""The names of `torch.distributed.fsdp.wrap`: torch's own policies, which wrap by any class."""

from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp.wrap import *  # noqa: F403

# Torch does not list these; recipes in the wild combine policies with them.
from shoal._torch.wrapping import _or_policy as _or_policy
from shoal._torch.wrapping import _Policy as _Policy
from shoal._torch.wrapping import _wrap_module_cls_individually as _wrap_module_cls_individually

__all__ = [*torch_wrap.__all__]

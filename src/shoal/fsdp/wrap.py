"""The names of `torch.distributed.fsdp.wrap`: torch's own policies, which wrap by any class."""

from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

# Torch does not list these; recipes in the wild combine policies with them.
from shoal._torch.wrapping import _or_policy as _or_policy
from shoal._torch.wrapping import _Policy as _Policy
from shoal._torch.wrapping import _wrap_module_cls_individually as _wrap_module_cls_individually

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

"""torch's wrapper classes: how they choose modules, what they call things."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.algorithms._comm_hooks import default_hooks as default_hooks
from torch.distributed.fsdp import ShardingStrategy, _wrap_utils
from torch.distributed.fsdp import _common_utils as fsdp_common
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import (
    _wrap_module_cls_individually as _wrap_module_cls_individually,
)

auto_wrap = _wrap_utils._auto_wrap
"""Wraps the modules inside a module that a policy chooses, as torch's wrapper does it."""


HYBRID_SHARD_ZERO2 = ShardingStrategy._HYBRID_SHARD_ZERO2
"""`HYBRID_SHARD` that keeps parameters full between forward and backward."""


CHECKPOINT_PREFIX: str = checkpoint_wrapper._CHECKPOINT_PREFIX
"""The level that a wrapper for activations adds to names."""


ActivationWrapper = checkpoint_wrapper.ActivationWrapper
"""What recomputes or offloads the activations of a module inside."""


TrainingState = fsdp_common.TrainingState
"""What a wrapper is doing, as errors and users' code call it."""


def compressing_hooks() -> dict[Callable[..., Any], torch.dtype]:
    """The communication hooks of DDP that send gradients in another dtype, and which."""
    hooks: Any = importlib.import_module(f"{dist.__name__}.algorithms.ddp_comm_hooks.default_hooks")
    return {hooks.fp16_compress_hook: torch.float16, hooks.bf16_compress_hook: torch.bfloat16}

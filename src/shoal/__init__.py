"""shoal: sharded training on PyTorch, where a step is a plan.

Names are imported when they are first used, so that `import shoal`, and with it every command's
`--help`, does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shoal import _requirements
from shoal.version import __version__

if TYPE_CHECKING:
    from shoal.compile.step.compile_step import compile_step
    from shoal.ddp.replicate import replicate
    from shoal.runtime.fsdp_module import (
        FSDPModule,
        UnshardHandle,
        register_fsdp_forward_method,
        share_comm_ctx,
    )
    from shoal.runtime.full_parameters import full_parameters
    from shoal.runtime.fully_shard import fully_shard
    from shoal.runtime.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
    from shoal.tensor.sharded import ShardedTensor
    from shoal.uneven.join import join

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ShardedTensor",
    "UnshardHandle",
    "__version__",
    "compile_step",
    "full_parameters",
    "fully_shard",
    "join",
    "register_fsdp_forward_method",
    "replicate",
    "share_comm_ctx",
]

_MODULES = {
    "CPUOffloadPolicy": "shoal.runtime.policy",
    "FSDPModule": "shoal.runtime.fsdp_module",
    "MixedPrecisionPolicy": "shoal.runtime.policy",
    "OffloadPolicy": "shoal.runtime.policy",
    "ShardedTensor": "shoal.tensor.sharded",
    "UnshardHandle": "shoal.runtime.fsdp_module",
    "compile_step": "shoal.compile.step.compile_step",
    "full_parameters": "shoal.runtime.full_parameters",
    "fully_shard": "shoal.runtime.fully_shard",
    "join": "shoal.uneven.join",
    "register_fsdp_forward_method": "shoal.runtime.fsdp_module",
    "replicate": "shoal.ddp.replicate",
    "share_comm_ctx": "shoal.runtime.fsdp_module",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_requirements.check_torch()

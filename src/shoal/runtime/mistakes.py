"""What `fully_shard` and `replicate` are given: torch's objects become ours, mistakes get words.

All of it is decided from arguments that every rank has, before anything changes or communicates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal.errors import UsageError
from shoal.layout import Layout
from shoal.mesh import default_mesh
from shoal.runtime.parameter_wrapping import NumberWrapping
from shoal.runtime.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from shoal.runtime.unit import Unit

_PREFETCH = "nothing: the next unit is always prefetched; set_modules_to_{}_prefetch chooses others"
_IGNORED = "ignored_params={...}, a set of parameters"
_OF_WRAPPER = {
    "auto_wrap_policy": "one call on each block, then one on the model",
    "backward_prefetch": _PREFETCH.format("backward"),
    "cpu_offload": "offload_policy=CPUOffloadPolicy()",
    "device_id": "mesh=init_device_mesh('cuda', ...), after torch.cuda.set_device(...)",
    "device_mesh": "mesh=...",
    "forward_prefetch": _PREFETCH.format("forward"),
    "ignored_modules": _IGNORED,
    "ignored_states": _IGNORED,
    "limit_all_gathers": "nothing: it gathers one unit ahead",
    "mixed_precision": "mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)",
    "param_init_fn": "model.to_empty(device=...) after sharding, then your initialisation",
    "process_group": "mesh=DeviceMesh.from_group(group, 'cuda')",
    "sharding_strategy": "reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP, and "
    "a mesh of two axes (replicate, shard) for HYBRID_SHARD",
    "sync_module_states": "set_model_state_dict(model, state, options=StateDictOptions("
    "full_state_dict=True, broadcast_from_rank0=True)) of torch.distributed.checkpoint.state_dict",
    "use_orig_params": "nothing: parameters keep their names",
}
"""The arguments of FSDP1's wrapper, and what stands for them here."""


def refuse_unknown(function: str, given: Mapping[str, Any]) -> None:
    """Raise for keyword arguments that a function does not have, as Python does."""
    for name in given:
        hint = _OF_WRAPPER.get(name)
        raise TypeError(
            f"{function}() got an unexpected keyword argument {name!r}"
            + ("" if hint is None else f", which is FullyShardedDataParallel's. Here it is {hint}")
        )


def mesh_of(given: object, default: tuple[str, ...] | None = None) -> DeviceMesh:
    """The mesh to work on; by default all ranks."""
    if given is None:
        return default_mesh() if default is None else default_mesh(mesh_dim_names=default)
    if isinstance(given, DeviceMesh):
        return given
    hint = "init_device_mesh('cuda', (num_ranks,)) of torch.distributed.device_mesh makes one"
    if isinstance(given, dist.ProcessGroup):
        hint = "DeviceMesh.from_group(group, 'cuda') makes one of a process group"
    raise UsageError(f"mesh must be a DeviceMesh, got {_shown(given)}: {hint}")


def precision_of(given: object) -> MixedPrecisionPolicy:
    """The dtypes to compute and reduce in; torch's own policy means the same."""
    if given is None:
        return MixedPrecisionPolicy()
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if isinstance(given, fsdp.MixedPrecisionPolicy):
        names = (field.name for field in fields(MixedPrecisionPolicy))
        shared = {name: getattr(given, name) for name in names if hasattr(given, name)}
        return MixedPrecisionPolicy(**shared)
    dtype = given if isinstance(given, torch.dtype) else getattr(given, "param_dtype", None)
    raise UsageError(
        f"mp_policy must be a MixedPrecisionPolicy, got {_shown(given)}: pass "
        f"mp_policy=MixedPrecisionPolicy(param_dtype={dtype or 'torch.bfloat16'})"
    )


def offload_of(given: object) -> OffloadPolicy:
    """Where shards live; torch's own policies mean the same."""
    if given is None:
        return OffloadPolicy()
    if isinstance(given, OffloadPolicy):
        return given
    if isinstance(given, fsdp.CPUOffloadPolicy):
        return CPUOffloadPolicy(pin_memory=given.pin_memory)
    if type(given) is fsdp.OffloadPolicy:
        return OffloadPolicy()
    raise UsageError(
        f"offload_policy must be an OffloadPolicy, got {_shown(given)}: pass CPUOffloadPolicy() to "
        "keep shards in host memory, or leave it out"
    )


def ignored_of(given: Iterable[object] | None) -> set[nn.Parameter]:
    """The parameters to leave alone."""
    ignored = list(given or ())
    for one in ignored:
        if not isinstance(one, nn.Parameter):
            hint = "model.get_parameter(name) gives one by its name"
            raise UsageError(f"ignored_params must be parameters, got {_shown(one)}: {hint}")
    return set(cast(list[nn.Parameter], ignored))


def layout_of(given: object) -> Layout | None:
    """How parameters are cut, if somebody chose."""
    if given is None:
        return None
    names = {one.__name__.lower(): one.__name__ for one in Layout.__subclasses__()}
    if isinstance(given, type) and issubclass(given, Layout):
        raise UsageError(
            f"layout must be a layout, got the class {given.__name__}: pass {given.__name__}(...)"
        )
    if not isinstance(given, Layout):
        hint = names.get(given.lower()) if isinstance(given, str) else None
        hint = f"pass {hint}(...)" if hint else "pass Even(), Flat(), Rows(), Block(k) or Whole()"
        raise UsageError(f"layout must be a Layout, got {_shown(given)}: {hint} of shoal.layout")
    kind = type(given)
    if kind.__repr__ is object.__repr__ or kind.__eq__ is object.__eq__:
        raise UsageError(
            f"layout {kind.__name__} has no value: ranks compare layouts by what repr() says, and "
            f"its repr() is an address. Make {kind.__name__} a @dataclass(frozen=True), or define "
            "__eq__, __hash__ and __repr__"
        )
    return given


def _shown(given: object) -> str:
    is_short = isinstance(given, (str, int, float, torch.dtype))
    return f"{given!r} of type {type(given).__name__}" if is_short else f"a {type(given).__name__}"


def check_plain_values(unit: Unit, module: nn.Module, state: dict[str, Any], at: str) -> None:
    """Raise where `load_state_dict` would copy whole tensors into DTensors, which torch cannot.

    Numbers are whole on every rank. torch's full state dicts have them as they are: they become
    DTensors.
    """
    for member in unit.shards.members:
        for name in (home.name for home in member.homes if home.module is module):
            value = state.get(at + name)
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                continue
            if isinstance(member.wrapping, NumberWrapping) and value.ndim == 0:
                home = unit.shards.home_device(unit.device)  # the parameter may be on meta
                state[at + name] = member.wrapping.shard(value.to(home))
                continue
            raise UsageError(
                f"load_state_dict got a plain tensor of shape {tuple(value.shape)} for the sharded "
                f"parameter {at + name!r}. Load whole values by set_model_state_dict(model, state, "
                "options=StateDictOptions(full_state_dict=True)) of "
                "torch.distributed.checkpoint.state_dict, or inside of full_parameters(model, "
                "writeback=True)"
            )

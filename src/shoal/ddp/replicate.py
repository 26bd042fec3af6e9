"""The entry point: `replicate(module)` keeps a module's copies on all ranks the same, in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal._torch import composable, dynamo
from shoal.comm.buckets import BUCKET_MIB, FIRST_BUCKET_MIB
from shoal.comm.transport import Transport
from shoal.ddp.broadcast import broadcast
from shoal.ddp.bucket import Named
from shoal.ddp.reducer import Reducer, ReducerOptions
from shoal.ddp.replicated import Replica, ReplicatedModule
from shoal.errors import MeshError, ShardedTwiceError, UsageError
from shoal.runtime.module_call import swap_class
from shoal.runtime.module_state import map_tensors, state_of
from shoal.runtime.rank_guard import check_tensors_agree
from shoal.sharding_wrapper import wrappers_below

Module = TypeVar("Module", bound=nn.Module)
Device = int | torch.device


def replicate(
    module: Module,
    device_mesh: DeviceMesh | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float = BUCKET_MIB,
    first_bucket_mb: float = FIRST_BUCKET_MIB,
    broadcast_buffers: bool = True,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
    mixed_precision: object = None,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    device_id: Device | None = None,
    device_ids: Sequence[Device] | None = None,
) -> Module:
    """Give all ranks rank 0's parameters and buffers, and average gradients in every backward.

    The ranks are those of a 1-D mesh or of a process group, by default all. Parameters stay plain
    tensors under their own names; the module is changed in place and returned. Collective.

    Gradients travel in buckets of about `bucket_cap_mb`, the first one smaller, each as soon as it
    is complete. `gradient_as_bucket_view` makes `.grad` a view of a bucket: one copy less, but its
    memory is written again in the next backward. `find_unused_parameters` allows backwards that do
    not come to all parameters, `static_graph` says that all steps come to the same ones, as often
    as the first one. Frozen parameters, and what is ignored, are left alone in backward. Inputs are
    moved to `device_id`, or to the one of `device_ids`, if it is given.
    """
    options = ReducerOptions(
        bucket_cap_mb=bucket_cap_mb,
        first_bucket_mb=first_bucket_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=gradient_as_bucket_view,
        static_graph=static_graph,
    )
    if mixed_precision is not None:
        raise NotImplementedError(
            "shoal: replicate(mixed_precision=...) is not supported; use torch.autocast, or "
            "fully_shard with a mp_policy on a mesh that replicates"
        )
    _check_unmanaged(module)
    transport = Transport(_group_of(device_mesh, process_group))
    modules = _managed(module, set(ignored_modules))
    ignored = set(ignored_params)
    named = [(n, p) for n, p in _parameters(modules) if p not in ignored]
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    _check(module, named, trained)
    device = device_of_inputs(trained[0][1].device, device_id, device_ids)
    shared = modules if broadcast_buffers else ()
    buffers = [(one, n) for _, one in shared for n, b in one._buffers.items() if b is not None]
    described = {n if p.requires_grad else f"{n} (frozen)": p.detach() for n, p in named}
    check_tensors_agree(transport.group, described)
    replica = Replica(module, Reducer(trained, transport, options), transport, buffers)
    broadcast([parameter for _, parameter in named], transport, reason="parameters of rank 0")
    replica.broadcast_buffers()
    replica.attach(module)
    if device is not None:
        move_inputs(module, device)
    dynamo.fuse_traced_averages(bucket_cap_mb)
    composable.register_composable(module, "replicate")
    swap_class(module, ReplicatedModule, "DDP", _COPY_REFUSAL)
    return module


def _check_unmanaged(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise UsageError(f"replicate takes a module, got a {type(module).__name__}")
    if wrappers_below(module):
        raise ShardedTwiceError(
            f"FullyShardedDataParallel manages this {type(module).__name__} or a module in it, so "
            "it cannot be replicated; use ShardingStrategy.HYBRID_SHARD, or NO_SHARD"
        )
    if state_of(module) is not None or composable.is_fully_sharded(module):
        raise ShardedTwiceError(
            f"fully_shard manages this {type(module).__name__} already, so it cannot be "
            "replicated; use one of the two, or fully_shard on a mesh with an axis that replicates"
        )
    for name, one in module.named_modules():
        if composable.replicates(one):
            raise ShardedTwiceError(
                f"replicate() manages {name or type(one).__name__!r} already; call it once, on "
                "the whole model"
            )


def _group_of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if mesh is not None and group is not None:
        raise MeshError("replicate takes a device_mesh or a process_group, got both")
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise MeshError(f"replicate needs a mesh of one axis, got {mesh}; pass mesh['name']")
        return mesh.get_group()
    if group is not None:
        return group
    if not dist.is_initialized():
        raise MeshError(
            "replicate needs a process group: start the program with torchrun and call "
            "torch.distributed.init_process_group first"
        )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _managed(root: nn.Module, ignored: set[nn.Module]) -> list[tuple[str, nn.Module]]:
    """The modules below, but for those that are ignored or sharded, with their prefixes."""
    found: dict[nn.Module, str] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        is_sharded = state_of(module) is not None or composable.is_fully_sharded(module)
        if module in found or module in ignored or is_sharded:
            return
        found[module] = prefix
        for name, child in module.named_children():
            visit(child, f"{prefix}{name}.")

    visit(root, "")
    return [(prefix, module) for module, prefix in found.items()]


def _parameters(modules: Iterable[tuple[str, nn.Module]]) -> list[Named]:
    """Each parameter once, by its first name, in the order of `named_parameters`."""
    names: dict[nn.Parameter, str] = {}
    for prefix, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(parameter, prefix + name)
    return [(name, parameter) for parameter, name in names.items()]


def _check(
    root: nn.Module,
    named: Iterable[Named],
    trained: list[Named],
) -> None:
    """Refuse what cannot be replicated, by name; every rank sees the same and raises alike."""
    if not trained:
        raise UsageError(
            f"replicate: no parameter of this {type(root).__name__} requires a gradient, so there "
            "is nothing to average; use the module as it is"
        )
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UsageError(
                f"parameter {name!r} has no shape yet; run a forward of the lazy module first"
            )
        if parameter.is_meta:
            raise UsageError(
                f"parameter {name!r} is on the meta device; give it memory first "
                "(module.to_empty(device=...), then initialise it)"
            )
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"shoal: parameter {name!r} is a DTensor, which replicate does not support; use "
                "fully_shard with dp_mesh_dims on the whole mesh"
            )
        if hasattr(parameter, "_in_backward_optimizers"):
            raise NotImplementedError(
                f"shoal: an optimizer of torch's _apply_optimizer_in_backward is on {name!r}; use "
                "parameter.register_post_accumulate_grad_hook, which replicate calls when the "
                "gradient is averaged"
            )


def device_of_inputs(
    home: torch.device, device_id: Device | None, device_ids: Sequence[Device] | None
) -> torch.device | None:
    """Where inputs are moved to, if anywhere: named as torch names it, and where parameters are."""
    if device_id is not None and not isinstance(device_id, (int, torch.device)):
        raise RuntimeError(
            f"Expected device_id to be int or torch.device, but got {type(device_id)}"
        )
    if device_ids is not None:
        if device_id is not None or len(device_ids) != 1:
            raise UsageError(
                f"a module trains on one device: expected device_id, or device_ids of one entry, "
                f"got device_id={device_id!r} and device_ids={list(device_ids)!r}"
            )
        device_id = device_ids[0]
    if device_id is None or device_id == torch.device("cpu") == home:
        return None
    device = torch.device(home.type, device_id) if isinstance(device_id, int) else device_id
    if home.type == "cpu" or device != home:
        raise UsageError(
            f"the module is on {home}, but its device is given as {device_id!r}; move the module "
            "there first, and give no device to a module on the CPU"
        )
    return device


def move_inputs(module: nn.Module, device: torch.device) -> None:
    """From now on, move whatever the module is called with to a device."""

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    def before(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return map_tensors(to_device, args), map_tensors(to_device, kwargs)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)


_COPY_REFUSAL = (
    "a replicated module cannot be deep-copied: copy it before replicate, or build another "
    "one and load_state_dict() this one's state_dict()"
)

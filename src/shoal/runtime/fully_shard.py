"""The entry points: `fully_shard(module)` shards parameters, `replicate(module)` leaves them whole.

Both change the module in place, and its class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Never, TypedDict, TypeVar, Unpack, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal._torch import composable
from shoal.comm.imagined_device import device_of, imagined
from shoal.errors import InvariantError, MeshError, ShardedTwiceError, UsageError
from shoal.layout import Even, Layout
from shoal.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    mesh_info_of,
    post_forward_mesh_info,
)
from shoal.runtime.collect import (
    check,
    check_borrowed,
    check_not_outer,
    collect,
    group,
    move_to,
    without_borrowed,
)
from shoal.runtime.fsdp_module import FSDPModule, torch_state
from shoal.runtime.gather import PostForward
from shoal.runtime.mistakes import (
    check_plain_values,
    ignored_of,
    layout_of,
    mesh_of,
    offload_of,
    precision_of,
    refuse_unknown,
)
from shoal.runtime.module_call import swap_class
from shoal.runtime.module_state import ModuleState, state_of
from shoal.runtime.policy import MixedPrecisionPolicy, OffloadPolicy
from shoal.runtime.unit import Unit
from shoal.tensor.sharded import ShardedTensor
from shoal.tensor.torch_function import listen

Function = TypeVar("Function", bound=Callable[..., Any])


def _with_state(function: Function) -> Function:
    """As torch has it: `fully_shard.state(module)`."""
    vars(function)["state"] = torch_state
    return function


class ShardOptions(TypedDict, total=False):
    """The arguments of `fully_shard`, for type checkers."""

    mesh: DeviceMesh | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None
    layout: Layout | None


@overload
def fully_shard(module: nn.Module, **options: Unpack[ShardOptions]) -> FSDPModule: ...
@overload
def fully_shard(
    module: Sequence[nn.Module], **options: Unpack[ShardOptions]
) -> Sequence[FSDPModule]: ...
@_with_state
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    layout: Layout | None = None,
    **unknown: Never,
) -> Any:
    """Shard the parameters of a module that no call on a submodule has sharded before.

    They form one unit: gathered together before the module's forward and backward, freed after,
    their gradients reduced together. Call it bottom-up, on the blocks and then on the whole
    model, and build the optimizer afterwards. The module is changed in place and returned; its
    class gets the methods of `FSDPModule`.

    Args:
        module: A module, or a list of modules whose parameters form one unit together.
        mesh: The ranks. With one axis, parameters are sharded over it. With two, they are
            replicated over the first and sharded over the second. By default one axis with all
            ranks.
        reshard_after_forward: Whether parameters are freed between forward and backward. False
            keeps them, which saves a gather and costs their memory. A number keeps them cut
            over groups of so many ranks. By default all units but the root's are freed.
        shard_placement_fn: Called with each parameter; returns `Shard(dim)` to cut it along
            another dim than 0, or None.
        mp_policy: In which dtypes parameters are gathered and gradients are reduced, and to which
            inputs and outputs are cast. By default all keep their dtype.
        offload_policy: `CPUOffloadPolicy()` keeps shards, gradients and optimizer state on the
            host, where the optimizer then steps. By default they are on the device.
        ignored_params: Parameters that stay as they are: neither moved, sharded nor reduced.
        dp_mesh_dims: Which axes of a mesh with more axes replicate and shard; the others are for
            tensor parallelism and its like.
        layout: How parameters are cut. `Even()`, the default, gives DTensors. `Flat()`, `Rows()`,
            `Block(k)`, `Whole()` and layouts of your own give `ShardedTensor`s.

    Returns:
        The module, or the list, that was given.

    Raises:
        UsageError: An argument is wrong, or the module cannot be sharded; the message says which
            and what to do. It is a `ValueError`.
        ShardedTwiceError: The module is sharded or replicated already.
    """
    refuse_unknown("fully_shard", unknown)
    policy, offload = precision_of(mp_policy), offload_of(offload_policy)
    ignored = ignored_of(ignored_params)
    layout = layout_of(layout)
    modules = modules_of(module, "fully_shard")
    mesh = mesh_of(mesh)
    check_device(mesh)
    info = mesh_info_of(mesh, dp_mesh_dims)
    make_units(
        modules,
        info,
        policy,
        offload,
        ignored,
        reshard_after_forward,
        shard_placement_fn,
        layout,
    )
    for one in modules:
        composable.register_composable(one, "fully_shard", torch_state(one))
        swap_class(one, FSDPModule, "FSDP", COPY_REFUSAL)
    return module


def make_units(
    modules: list[nn.Module],
    info: DataParallelMeshInfo,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: set[nn.Parameter],
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    layout: Layout | None = None,
) -> None:
    """Let the engine manage the parameters of modules that `modules_of` has checked."""
    _post_forward(reshard_after_forward, info)  # refuses a wrong number before anything changes
    device = device_of(info.mesh)
    found, borrowed = without_borrowed(collect(modules, ignored))
    check_not_outer(found, modules)
    check(found)
    check_borrowed(borrowed, info, policy)
    move_to(found, modules, device, ignored)
    units = []
    for part in group(found, layout, info, shard_placement_fn):
        name = ", ".join(type(m).__name__ for m in modules)
        unit = Unit(name, part.sources, part.layout, part.mesh_info, device, policy, offload)
        after = _post_forward(reshard_after_forward, part.mesh_info)
        if after is not None:
            unit.post = PostForward(unit, after)
        units.append(unit)
    reshards = None if reshard_after_forward is None else reshard_after_forward is not False
    if not isinstance(reshard_after_forward, bool) and reshard_after_forward == 1:
        reshards = False
    ModuleState(modules, units, policy, reshards, device, borrowed)
    for unit in units:
        _check_loads(unit, {home.module for m in unit.shards.members for home in m.homes})
    for one in borrowed:
        _check_loads(one.unit, {home.module for home in one.homes})
    _let_mix(modules)


def _check_loads(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Have state dicts looked at before they are loaded into DTensors."""
    if not isinstance(unit.layout, Even):
        return  # a ShardedTensor takes its elements out of a whole tensor

    def look(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        if not unit.step.is_lent:
            check_plain_values(unit, module, state, prefix)

    for module in modules:
        module.register_load_state_dict_pre_hook(look)


def modules_of(module: object, function: str) -> list[nn.Module]:
    """The outermost of the modules that were given, none of which is managed already."""
    given = [module] if isinstance(module, nn.Module) else module
    if not isinstance(given, (list, tuple)) or not given:
        raise UsageError(f"{function} takes a module or a list of modules, got {module!r}")
    for one in given:
        if not isinstance(one, nn.Module):
            raise UsageError(f"{function} takes modules, got a {type(one).__name__} in the list")
        if getattr(one.forward, "__func__", None) is nn.Module.forward:
            raise UsageError(
                f"{function} does not support containers that do not implement forward: got "
                f"{type(one).__name__}; call it on each of its children"
            )
        is_replicated = composable.replicates(one)
        if is_replicated or state_of(one) is not None:
            raise ShardedTwiceError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"{'replicate' if is_replicated else 'fully_shard'} manages this "
                f"{type(one).__name__} already, so {function} cannot: call one of the two, once on "
                "each block and once on the whole model"
            )
    below = {child for one in given for child in one.modules() if child is not one}
    return [one for one in given if one not in below]


_classes: set[type] = set()
"""Those of all parameters that were seen below sharded modules."""


def _let_mix(modules: list[nn.Module]) -> None:
    """Make lists of DTensors and ShardedTensors work, once some model may give both to torch."""
    _classes.update(type(parameter) for one in modules for parameter in one.parameters())
    if {DTensor, ShardedTensor} <= _classes:
        listen()


def check_device(mesh: DeviceMesh) -> None:
    """A mesh of devices that are not there has no process groups either."""
    kind = mesh.device_type
    is_imagined = imagined() is not None
    if kind == "cuda" and not torch.cuda.is_available() and not is_imagined:
        raise UsageError(
            f"the mesh is of {kind!r} devices, but this process sees none; make it of 'cpu' "
            f"devices (init_device_mesh('cpu', ...)), or run where there are {kind!r} devices"
        )


def _post_forward(
    reshard_after_forward: bool | int | None, info: DataParallelMeshInfo
) -> FSDPMeshInfo | None:
    """The smaller mesh to reshard to after forward, if one was asked for."""
    smaller = post_forward_mesh_info(reshard_after_forward, info)
    return None if smaller is info else smaller


COPY_REFUSAL = (
    "FSDP does not support deepcopy: copy the module before fully_shard, or build another "
    "one and load_state_dict() this one's state_dict()"
)


class ReplicateModule(FSDPModule):
    """What `replicate` makes of a module's class."""


class ReplicateOptions(TypedDict, total=False):
    """The arguments of `replicate`, for type checkers."""

    mesh: DeviceMesh | None
    mp_policy: MixedPrecisionPolicy | None
    offload_policy: OffloadPolicy | None
    ignored_params: set[nn.Parameter] | None
    dp_mesh_dims: DataParallelMeshDims | None


@overload
def replicate(module: nn.Module, **options: Unpack[ReplicateOptions]) -> ReplicateModule: ...
@overload
def replicate(
    module: Sequence[nn.Module], **options: Unpack[ReplicateOptions]
) -> Sequence[ReplicateModule]: ...
def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    **unknown: Never,
) -> Any:
    """Replicate a module over the one axis of a mesh, by default over all ranks.

    As `fully_shard`, with units, policies and the methods of `FSDPModule`, but each rank holds
    whole parameters (DTensors that are replicated): nothing is gathered over ranks, and gradients
    are all-reduced. The module is changed in place and returned. `shoal.replicate` is the other
    way to do it, which leaves parameters plain tensors.
    """
    refuse_unknown("replicate", unknown)
    policy, offload = precision_of(mp_policy), offload_of(offload_policy)
    ignored = ignored_of(ignored_params)
    _check_not_sharded(module)
    modules = modules_of(module, "replicate")
    mesh = mesh_of(mesh, ("replicate",))
    check_device(mesh)
    make_units(
        modules,
        _info_of(mesh, dp_mesh_dims),
        policy,
        offload,
        ignored,
        reshard_after_forward=False,
    )
    for one in modules:
        composable.register_composable(one, "replicate", torch_state(one))
        swap_class(one, ReplicateModule, "Replicate", COPY_REFUSAL)
    return module


def _check_not_sharded(module: object) -> None:
    if isinstance(module, nn.Module) and composable.is_fully_sharded(module):
        raise InvariantError(
            "Cannot apply `replicate()` on a Module already managed by `fully_shard`; use one of "
            "the two"
        )


def _info_of(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataParallelMeshInfo:
    if dims is None:
        if mesh.ndim != 1:
            raise MeshError(f"replicate expects a 1D DeviceMesh but got {mesh}")
        return DDPMeshInfo(mesh, replicate_mesh_dim=0)
    info = mesh_info_of(mesh, dims)
    if isinstance(info, FSDPMeshInfo):
        raise MeshError(
            f"replicate needs dp_mesh_dims that only replicate, got {dims}; use fully_shard to "
            "shard over an axis"
        )
    return info

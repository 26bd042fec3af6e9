"""Which parameters a call of `fully_shard` takes or borrows, and whether it can.

    fully_shard(embedding)    its unit owns the weight
    fully_shard(head)         borrows it (tied weights): the owner is gathered for the head, too

A borrowed parameter stays one `nn.Parameter`, under as many names as without shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shoal._torch import composable, subclasses
from shoal.errors import ShardedTwiceError, UsageError
from shoal.layout import Even, Layout, ParamSpec
from shoal.layout.strides import shares_elements, strides_of
from shoal.mesh import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    own_mesh_info,
)
from shoal.runtime.gather_hooks import has_hooks_before_sharding, refusal
from shoal.runtime.module_state import state_of
from shoal.runtime.parameter_wrapping import (
    ParameterWrapping,
    ShardedWrapping,
    bytes_of,
    dtensor_wrapping,
    num_copies_on,
)
from shoal.runtime.policy import MixedPrecisionPolicy, ShardPlacementResult
from shoal.runtime.shards import Home, Member, ParameterSource
from shoal.runtime.unit import Borrowed, Unit
from shoal.runtime.updates import is_kept, owners_known, replaced_home
from shoal.tensor.packed import Packed
from shoal.tensor.sharded import ShardedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A parameter, by the name it has below the modules, with all places it is registered at."""

    name: str
    parameter: nn.Parameter
    homes: tuple[Home, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters of one mesh, which become one unit."""

    mesh_info: DataParallelMeshInfo
    layout: Layout
    sources: tuple[ParameterSource, ...]


def collect(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[Found]:
    """The parameters below some modules that no other unit owns, each once, with all its homes."""
    names: dict[nn.Parameter, str] = {}
    homes: dict[nn.Parameter, list[Home]] = {}
    for prefix, module in _managed(modules):
        for name, parameter in module._parameters.items():
            if parameter is None or parameter in ignored:
                continue
            home = Home(module=module, name=name)
            names.setdefault(parameter, prefix + name)
            if home not in homes.setdefault(parameter, []):
                homes[parameter].append(home)
    return [
        Found(name=name, parameter=parameter, homes=tuple(homes[parameter]))
        for parameter, name in names.items()
    ]


def _managed(modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules below, down to those that were sharded before or are replicated."""
    prefixes = [f"{i}." if len(modules) > 1 else "" for i in range(len(modules))]
    queue = list(zip(prefixes, modules, strict=True))
    seen: set[nn.Module] = set()
    while queue:
        prefix, current = queue.pop(0)
        if current in seen or state_of(current) is not None or composable.replicates(current):
            continue
        seen.add(current)
        yield prefix, current
        queue.extend((f"{prefix}{n}.", child) for n, child in current.named_children())


def move_to(
    found: Sequence[Found],
    modules: Sequence[nn.Module],
    device: torch.device,
    ignored: set[nn.Parameter],
) -> None:
    """Move parameters and buffers to the device that computes, but for those on meta."""
    buffers = [b for _, module in _managed(modules) for b in module.buffers(recurse=False)]
    for tensor in (*(f.parameter for f in found), *buffers):
        if tensor.device == device or tensor.device.type == "meta" or tensor in ignored:
            continue
        if isinstance(tensor, DTensor):
            raise UsageError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{tensor.device_mesh.device_type} for DTensor and {device.type} for FSDP; "
                "distribute it over a mesh of that type"
            )
        _move(tensor, device)


@torch.no_grad()
def _move(tensor: torch.Tensor, device: torch.device) -> None:
    moved = tensor.to(device)
    if not subclasses.wraps_others(tensor):
        tensor.data = moved
        return
    # A wrapper has no data of its own to be replaced.
    if isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, moved)


def without_borrowed(found: Sequence[Found]) -> tuple[list[Found], list[Borrowed]]:
    """The parameters that no other unit has sharded, and those that are tied to one that has."""
    owners = _owners() if any(map(_may_be_borrowed, found)) else {}
    own: list[Found] = []
    borrowed: list[Borrowed] = []
    for item in found:
        home = replaced_home(item.parameter)
        owner = owners.get(id(item.parameter) if home is None else home)
        if owner is None or set(item.homes) & set(owner[1].homes):
            own.append(item)
        else:
            unit, member = owner
            borrowed.append(Borrowed(unit=unit, member=member, homes=item.homes, name=item.name))
    return own, borrowed


def _may_be_borrowed(item: Found) -> bool:
    parameter = item.parameter
    is_shard = isinstance(parameter, (DTensor, ShardedTensor)) or is_kept(parameter)
    return is_shard or replaced_home(parameter) is not None


def _owners() -> Mapping[object, tuple[Unit, Member]]:
    """The unit and member of every sharded parameter, by its places and by itself."""
    found: dict[object, tuple[Unit, Member]] = {}
    for unit in owners_known():
        for member in unit.shards.members:
            found[id(member.sharded)] = unit, member
            found.update((home, (unit, member)) for home in member.homes)
    return found


def check_borrowed(
    borrowed: Sequence[Borrowed], info: DataParallelMeshInfo, policy: MixedPrecisionPolicy
) -> None:
    """Refuse tied parameters that two modules want in two ways; every rank sees the same."""
    for one in borrowed:
        name, there = one.name, one.unit.qualified(one.member.spec.name)
        dtype, wanted = (p.compute_dtype(one.member.dtype) for p in (one.unit.policy, policy))
        if dtype is not wanted:
            raise UsageError(
                f"parameter {name!r} is tied to {there!r} (one parameter, two modules), which is "
                f"computed in {dtype}, and this call asks for {wanted}: give both calls one "
                "param_dtype"
            )
        ranks, others = _ranks_of(one.unit.mesh_info), _ranks_of(info)
        if ranks != others:
            raise UsageError(
                f"parameter {name!r} is tied to {there!r} (one parameter, two modules), which is "
                f"sharded and replicated over ranks {ranks}, and this call is for {others}: give "
                "both calls one mesh"
            )


def _ranks_of(info: DataParallelMeshInfo) -> list[list[int]]:
    groups = [
        info.shard_process_group if isinstance(info, FSDPMeshInfo) else None,
        info.replicate_process_group if isinstance(info, DDPMeshInfo) else None,
    ]
    return [[] if group is None else dist.get_process_group_ranks(group) for group in groups]


def check_not_outer(found: Sequence[Found], modules: Sequence[nn.Module]) -> None:
    """Refuse what a call on an outer module has sharded already: calls go from the inside out."""
    if not any(isinstance(item.parameter, (DTensor, ShardedTensor)) for item in found):
        return
    owners = {id(p): owner for owner in owners_known() for p in owner.sharded_parameters()}
    for item in found:
        owner = owners.get(id(item.parameter))
        if owner is not None:
            kinds = ", ".join(type(module).__name__ for module in modules)
            members = owner.shards.members
            name = next(one.spec.name for one in members if one.sharded is item.parameter)
            raise ShardedTwiceError(
                f"parameter {name!r} of {owner.name} belongs to the unit of that module, which is "
                f"around this {kinds} and was sharded before. Call fully_shard from the inside "
                "out: on the blocks first, then on the whole model"
            )


def check(found: Sequence[Found]) -> None:
    """Refuse what cannot be sharded, by name; every rank sees the same and raises alike."""
    for item in found:
        check_strides(item.name, bytes_of(item.parameter))


def check_strides(name: str, tensor: torch.Tensor) -> None:
    """Refuse strides that no full parameter can have."""
    if shares_elements(tensor):
        raise UsageError(
            f"parameter {name!r} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, by "
            "which several of its elements are one, so that no optimizer can step it: replace it "
            "by a copy (parameter.contiguous()) before it is sharded"
        )
    if has_hooks_before_sharding(name, tensor) and strides_of(tensor) is not None:
        raise refusal(name, f"strides of {tensor.stride()}: make it contiguous")


def group(
    found: Sequence[Found],
    layout: Layout | None,
    info: DataParallelMeshInfo,
    place: Callable[[nn.Parameter], Any] | None,
) -> list[Group]:
    """Parameters by the mesh they are sharded over, with the wrappings they take there.

    DTensors and tensors with gather hooks are cut evenly whatever the layout, as a group beside the
    others: only a DTensor can lie on more axes than those that are data-parallel, and hooks get
    even chunks.
    """
    if place is None:
        evenly = [one for one in found if _needs_chunks(one)]
        if evenly and not isinstance(layout, Even | None) and isinstance(info, FSDPMeshInfo):
            others = [one for one in found if not _needs_chunks(one)]
            return [*group(others, layout, info, None), *group(evenly, Even(), info, None)]
        return [_group(found, [0] * len(found), layout or Even(), info)] if found else []
    if layout is not None and not isinstance(layout, Even):
        raise UsageError(
            f"shard_placement_fn chooses dims of the layout Even; it cannot be used with {layout}"
        )
    if not isinstance(info, FSDPMeshInfo):
        raise UsageError(
            "shard_placement_fn needs a mesh with an axis that shards, got one that replicates"
        )
    by_group: dict[Any, tuple[FSDPMeshInfo, list[Found], list[int]]] = {}
    known: list[tuple[Any, FSDPMeshInfo]] = []
    for item in found:
        placement, given = _answer(place(item.parameter), info)
        own = next((ours for other, ours in known if other is given), None)
        if own is None:
            own = own_mesh_info(given)
            known.append((given, own))
        dim = _dim(item, placement)
        replicas = own.replicate_process_group if isinstance(own, HSDPMeshInfo) else None
        entry = by_group.setdefault((own.shard_process_group, replicas), (own, [], []))
        if entry[0] is not own:
            raise UsageError(
                f"parameter {item.name!r}: parameters of one process group must share one "
                f"FSDPMeshInfo object, got {own} and {entry[0]}"
            )
        entry[1].append(item)
        entry[2].append(dim)
    return [_group(items, dims, None, own) for own, items, dims in by_group.values()]


def _needs_chunks(item: Found) -> bool:
    return isinstance(item.parameter, DTensor) or has_hooks_before_sharding(
        item.name, item.parameter
    )


def _answer(result: Any, info: FSDPMeshInfo) -> tuple[Any, Any]:
    """A placement, and the mesh info it is for; torch's result has the same two fields."""
    if isinstance(result, ShardPlacementResult) or hasattr(result, "mesh_info"):
        return result.placement, result.mesh_info
    return result, info


def _dim(item: Found, placement: Any) -> int:
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise UsageError(
            f"shard_placement_fn must return None, Shard or ShardPlacementResult for "
            f"{item.name!r}, got {placement!r}"
        )
    data = bytes_of(item.parameter)
    num_dims = max(data.dim(), 1)
    dim = placement.dim + num_dims if placement.dim < 0 else placement.dim
    if not 0 <= dim < num_dims:
        raise AssertionError(
            f"Shard dim {placement.dim} is invalid for {data.dim()}D tensor: parameter "
            f"{item.name!r} has shape {tuple(data.shape)}"
        )
    return dim


def specs_of(found: Sequence[Found], layout: Layout, num_ranks: int) -> list[ParamSpec]:
    """The parameters as they are packed: with `Even` every rank has a copy of a number by itself.

    A DTensor has no other way to lie on one rank of several.
    """
    numbers = (num_ranks,) if isinstance(layout, Even) else ()
    shapes = [tuple(bytes_of(item.parameter).shape) or numbers for item in found]
    return [
        ParamSpec(name=item.name, shape=shape, dtype=item.parameter.dtype)
        for item, shape in zip(found, shapes, strict=True)
    ]


def _group(
    found: Sequence[Found], dims: Sequence[int], layout: Layout | None, info: DataParallelMeshInfo
) -> Group:
    is_chosen = layout is not None
    layout = Even(tuple(dims)) if layout is None else layout
    specs = specs_of(found, layout, num_copies_on(info))
    if is_chosen and isinstance(layout, Even) and isinstance(info, FSDPMeshInfo):
        wanted = layout.pack(specs, info.shard_mesh_size).dims
        dims = [_dim(f, Shard(dim)) for f, dim in zip(found, wanted, strict=True)]
    if isinstance(layout, Even):
        wrappings: list[ParameterWrapping] = [
            dtensor_wrapping(f.name, f.parameter, dim, info)
            for f, dim in zip(found, dims, strict=True)
        ]
    else:
        wrappings = _sharded_wrappings(found, specs, layout, info)
    sources = tuple(
        ParameterSource(spec=spec, parameter=f.parameter, homes=f.homes, wrapping=wrapping)
        for spec, f, wrapping in zip(specs, found, wrappings, strict=True)
    )
    return Group(mesh_info=info, layout=layout, sources=sources)


def _sharded_wrappings(
    found: Sequence[Found], specs: Sequence[ParamSpec], layout: Layout, info: DataParallelMeshInfo
) -> list[ParameterWrapping]:
    if not isinstance(info, FSDPMeshInfo):
        raise UsageError(f"{layout} needs a mesh with an axis that shards, got one that replicates")
    packing = layout.pack(specs, info.shard_mesh_size)
    replica = info.replicate_mesh_rank if isinstance(info, HSDPMeshInfo) else 0
    return [
        ShardedWrapping(
            placement=Packed(
                packing=packing,
                index=index,
                group=info.shard_process_group,
                rank=info.shard_mesh_rank,
                replica=replica,
            )
        )
        for index in range(len(specs))
    ]

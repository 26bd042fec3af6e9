"""Sharded tensors put together from local tensors that are there: aliased, never copied.

    init_from_local_shards  shards of all ranks; what they say is compared in one exchange
    assemble_by_metadata    shards, and metadata of all ranks' that each rank has itself
    assemble_by_spec        one tensor, taken for this rank's shard of a spec

After the exchange all ranks raise or none. A rank whose own shards cannot be right says so in the
exchange instead of staying away from it, so that the other ranks raise too and do not wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch import sharded
from shoal._torch.sharded import LocalShard, ShardedTensorMetadata, ShardingSpec, TensorProperties
from shoal.doors.sharded_tensor import remote_shards
from shoal.doors.sharded_tensor.creation import shape_of
from shoal.tensor.listed import Listed, check_shards
from shoal.tensor.placement import group_or_default
from shoal.tensor.sharded import ShardedTensor

_Brought: TypeAlias = ShardedTensorMetadata | str | None
"""A rank's answer: metadata of its shards, the mistake in them, or None without shards."""


def init_from_local_shards(
    local_shards: list[LocalShard],
    *global_size: Any,
    process_group: ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Put the shards of all ranks together, after one exchange about them: collective.

    Where sizes of the whole are None, the shards are rows, one shard on each rank, in the order of
    ranks; offsets and sizes then follow from the shards' own sizes.
    """
    group = group_or_default(process_group)
    are_rows = None in global_size
    shape = shape_of([0 if size is None else size for size in global_size])
    metadata = _agreed_metadata(local_shards, shape, group)
    if are_rows:
        _stack(metadata, group)
        local_shards[0].metadata = metadata.shards_metadata[dist.get_rank(group)]
    check_shards(metadata.shards_metadata, metadata.size)
    placement = _placement(metadata, group, is_pinned=metadata.tensor_properties.pin_memory)
    return _assembled(local_shards, placement, metadata.tensor_properties, init_rrefs)


def assemble_by_metadata(
    local_shards: list[LocalShard],
    metadata: ShardedTensorMetadata,
    process_group: ProcessGroup | None,
    init_rrefs: bool,
    spec: ShardingSpec | None,
) -> ShardedTensor:
    """Put shards together by metadata of all ranks' shards, which ranks do not compare."""
    group = group_or_default(process_group)
    properties = metadata.tensor_properties
    placement = _placement(metadata, group, given_spec=spec, is_pinned=properties.pin_memory)
    num_expected = len(placement.own or ())
    if len(local_shards) != num_expected:
        raise RuntimeError(
            f"Number of local shards ({len(local_shards)}) does not match number of local shards "
            f"metadata in sharded_tensor_metadata ({num_expected}) on rank ({dist.get_rank()})"
        )
    _check_strided(properties)
    for shard in local_shards:
        _check_properties(shard, properties)
    check_shards(metadata.shards_metadata, metadata.size)
    return _assembled(local_shards, placement, properties, init_rrefs)


def assemble_by_spec(
    local: Tensor,
    spec: ShardingSpec,
    global_size: Sequence[Any],
    process_group: ProcessGroup | None,
    init_rrefs: bool,
) -> ShardedTensor:
    """Take a tensor for the shard that a spec gives this rank."""
    if not local.is_contiguous():
        raise ValueError(
            f"local_tensor is not a contiguous Tensor. Got strides {local.stride()} for shape "
            f"{tuple(local.shape)}: pass local_tensor.contiguous()"
        )
    group = group_or_default(process_group)
    properties = TensorProperties.create_from_tensor(local)
    metadata = spec.build_metadata(torch.Size(shape_of(global_size)), properties)
    own = _placement(metadata, group).own_shards(local.device)
    shards = [LocalShard(local, shard) for shard in own]
    return assemble_by_metadata(shards, metadata, group, init_rrefs, spec)


def assemble_without_group(
    local_shards: list[LocalShard], metadata: ShardedTensorMetadata, spec: ShardingSpec | None
) -> ShardedTensor:
    """Put shards together that are all in this process."""
    _check_strided(metadata.tensor_properties)
    check_shards(metadata.shards_metadata, metadata.size)
    own = tuple(metadata.shards_metadata.index(shard.metadata) for shard in local_shards)
    properties = metadata.tensor_properties
    options = {"given_spec": spec, "own": own, "is_pinned": properties.pin_memory}
    return _assembled(
        local_shards, _placement(metadata, None, **options), properties, init_rrefs=False
    )


def _placement(
    metadata: ShardedTensorMetadata, group: ProcessGroup | None, **options: Any
) -> Listed:
    shards, shape = tuple(metadata.shards_metadata), tuple(metadata.size)
    return Listed(listed=shards, shape=shape, group=cast(Any, group), **options)


def _assembled(
    local_shards: list[LocalShard],
    placement: Listed,
    properties: TensorProperties,
    init_rrefs: bool,
) -> ShardedTensor:
    locals_ = [shard.tensor for shard in local_shards]
    if not locals_:
        (device,) = placement.local_devices
        locals_ = [torch.empty(0, dtype=properties.dtype, device=device)]
    tensor = ShardedTensor.of(locals_, placement, requires_grad=properties.requires_grad)
    if init_rrefs:
        remote_shards.share(tensor)
    return tensor


def _stack(metadata: ShardedTensorMetadata, group: ProcessGroup) -> None:
    """Let shards be rows one after another, whatever offsets they claim."""
    shards = metadata.shards_metadata
    ranks = [sharded.parse_remote_device(group, shard.placement)[0] for shard in shards]
    if ranks != dist.get_process_group_ranks(group):
        raise AssertionError(
            "sizes of None need one shard on every rank of the group, got shards on ranks "
            f"{ranks}: pass the whole size"
        )
    height = 0
    for shard in shards:
        shard.shard_offsets = [height, *[0] * (len(shard.shard_sizes) - 1)]
        height += shard.shard_sizes[0]
    metadata.size = torch.Size([height, *shards[0].shard_sizes[1:]])


def _check_strided(properties: TensorProperties) -> None:
    if properties.layout != torch.strided:
        raise ValueError(
            f"Only torch.strided layout is currently supported, got {properties.layout}"
        )


def _check_properties(shard: LocalShard, properties: TensorProperties) -> None:
    """Raise unless a shard is what metadata of the whole say."""
    tensor, metadata = shard.tensor, shard.metadata
    place = metadata.placement
    if place is None:
        raise AssertionError(f"Must specify placement for `Shard`! Got {metadata}")
    if tensor.layout == torch.strided and not tensor.is_contiguous():
        raise ValueError(
            "Only torch.contiguous_format memory_format is currently supported, "
            f"got strides {tensor.stride()} on rank {place.rank()}"
        )
    of_tensor, of_shard = "tensor property", "local ShardMetadata"
    for name, whose, expected, found in (
        ("layout", of_tensor, properties.layout, tensor.layout),
        ("size", of_shard, [*metadata.shard_sizes], [*tensor.size()]),
        ("pin_memory", of_tensor, properties.pin_memory, tensor.is_pinned()),
        ("device", of_shard, place.device(), tensor.device),
        ("dtype", of_tensor, properties.dtype, tensor.dtype),
        ("requires_grad", of_tensor, properties.requires_grad, tensor.requires_grad),
    ):
        if expected != found:
            raise ValueError(
                f"Local shards' tensor {name} property is incompatible with {whose} on rank "
                f"{place.rank()}: {whose} {name}={expected}, local shard tensor {name}={found}."
            )


def _agreed_metadata(
    local_shards: list[LocalShard], shape: tuple[int, ...], group: ProcessGroup
) -> ShardedTensorMetadata:
    """Metadata of all ranks' shards, in the order of ranks: collective.

    Raises ValueError where shards of one rank are wrong, or where ranks disagree.
    """
    said: _Brought = None
    problem: ValueError | None = None
    try:
        said = _own_metadata(local_shards, shape, group)
    except ValueError as error:
        said, problem = str(error), error
    everyone: list[Any] = all_gather_objects(said, group)
    if problem is not None:
        raise problem
    wrong = {rank: text for rank, text in enumerate(everyone) if isinstance(text, str)}
    if wrong:
        raise ValueError(
            "other ranks of the group brought shards that cannot be used: "
            + "; ".join(f"rank {rank}: {text}" for rank, text in wrong.items())
        )
    brought = {rank: found for rank, found in enumerate(everyone) if found is not None}
    if not brought:
        raise ValueError(
            "ShardedTensor have no local shards on all ranks! Give at least one rank a shard"
        )
    _check_agreement(brought)
    first, *others = brought.values()
    for other in others:
        first.shards_metadata.extend(other.shards_metadata)
    return first


def all_gather_objects(value: Any, group: ProcessGroup) -> list[Any]:
    """Give every rank of a group what each of them has, in the order of ranks: collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _check_agreement(brought: dict[int, ShardedTensorMetadata]) -> None:
    """Raise unless all ranks brought shards of one size and with the same properties."""
    names = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")
    for name in ("global_size", *names):
        ranks: dict[str, list[int]] = {}
        for rank, metadata in brought.items():
            properties = metadata.tensor_properties
            said = tuple(metadata.size) if name == "global_size" else getattr(properties, name)
            ranks.setdefault(str(said), []).append(rank)
        if len(ranks) > 1:
            found = ", ".join(f"{name}={said} on rank:{who}" for said, who in ranks.items())
            raise ValueError(
                f"ShardedTensor {name} property does not match from different ranks! "
                f"Found {found}: make it the same on all"
            )


def _own_metadata(
    local_shards: list[LocalShard], shape: tuple[int, ...], group: ProcessGroup
) -> ShardedTensorMetadata | None:
    if not local_shards:
        return None
    for shard in local_shards:
        _check_shard(shard, group)
    _check_alike(local_shards)
    return ShardedTensorMetadata(
        shards_metadata=[shard.metadata for shard in local_shards],
        size=torch.Size(shape),
        tensor_properties=TensorProperties.create_from_tensor(local_shards[0].tensor),
    )


def _check_shard(shard: LocalShard, group: ProcessGroup) -> None:
    """Raise unless a shard is contiguous, and lies where its metadata say."""
    tensor, metadata, here = shard.tensor, shard.metadata, dist.get_rank()
    rank, device = sharded.parse_remote_device(group, metadata.placement)
    if tensor.layout != torch.strided:
        raise ValueError(
            f"Only torch.strided layout is currently supported, but found {tensor.layout} on "
            f"rank:{here}!"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            "Only torch.contiguous_format memory_format is currently supported! Got strides "
            f"{tensor.stride()} on rank:{here}: pass tensor.contiguous()"
        )
    if rank != here:
        raise ValueError(
            "Local shard metadata's rank does not match with the rank in its process group! Found "
            f"current rank: {here}, rank in {metadata}: {rank}"
        )
    if tensor.device != device:
        raise ValueError(
            "Local shard tensor device does not match with local Shard's placement! Found a tensor "
            f"on {tensor.device}, placement {metadata.placement} on rank:{here}"
        )
    if [*metadata.shard_sizes] != [*tensor.size()]:
        raise ValueError(
            f"Local shards' tensor size property need to be the same on rank:{here}! Found "
            f"{[*tensor.size()]} for {metadata}"
        )


def _check_alike(local_shards: Sequence[LocalShard]) -> None:
    """Raise unless all shards of this rank have the same properties."""
    first = TensorProperties.create_from_tensor(local_shards[0].tensor)
    for shard in local_shards[1:]:
        other = TensorProperties.create_from_tensor(shard.tensor)
        for name in ("pin_memory", "dtype", "requires_grad"):
            if getattr(first, name) != getattr(other, name):
                raise ValueError(
                    f"Local shards' tensor {name} property need to be the same on "
                    f"rank:{dist.get_rank()}! Found one local shard tensor {name}="
                    f"{getattr(first, name)}, the other local shard tensor {name}="
                    f"{getattr(other, name)}."
                )

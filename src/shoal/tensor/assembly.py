"""Sharded tensors put together from local tensors that are there: aliased, never copied.

assemble              shards of all ranks; what they say is compared in one exchange
assemble_by_metadata  shards, and metadata of all ranks' that each rank has itself
assemble_by_spec      one tensor, taken for this rank's shard of a spec
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch import sharded
from shoal._torch.sharded import LocalShard, ShardedTensorMetadata, ShardingSpec, TensorProperties
from shoal.tensor import remote
from shoal.tensor.agreement import agreed_metadata
from shoal.tensor.creation import group_or_default, shape_of
from shoal.tensor.listed import Listed, check_shards
from shoal.tensor.sharded import ShardedTensor


def init_from_local_shards(
    local_shards: list[LocalShard],
    *global_size: Any,
    process_group: ProcessGroup | None = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Put the shards of all ranks together, after one exchange about them: collective."""
    return assemble(local_shards, global_size, process_group, init_rrefs)


def assemble(
    local_shards: list[LocalShard],
    global_size: Sequence[Any],
    process_group: ProcessGroup | None,
    init_rrefs: bool,
) -> ShardedTensor:
    """Put the shards of all ranks together: collective.

    Where sizes of the whole are None, the shards are rows, one shard on each rank, in the order of
    ranks; offsets and sizes then follow from the shards' own sizes.
    """
    group = group_or_default(process_group)
    are_rows = None in global_size
    shape = shape_of([0 if size is None else size for size in global_size])
    metadata = agreed_metadata(local_shards, shape, group)
    if are_rows:
        _stack(metadata, group)
        local_shards[0].metadata = metadata.shards_metadata[dist.get_rank(group)]
    check_shards(metadata.shards_metadata, metadata.size)
    placement = Listed(
        listed=tuple(metadata.shards_metadata),
        shape=tuple(metadata.size),
        group=group,
        is_pinned=metadata.tensor_properties.pin_memory,
    )
    return _assembled(local_shards, placement, metadata.tensor_properties, init_rrefs)


def assemble_by_metadata(
    local_shards: list[LocalShard],
    metadata: ShardedTensorMetadata,
    process_group: ProcessGroup | None,
    init_rrefs: bool,
    spec: ShardingSpec | None,
) -> ShardedTensor:
    """Put shards together; every rank has the metadata of all, and nobody compares them."""
    group = group_or_default(process_group)
    properties = metadata.tensor_properties
    placement = Listed(
        listed=tuple(metadata.shards_metadata),
        shape=tuple(metadata.size),
        group=group,
        given_spec=spec,
        is_pinned=properties.pin_memory,
    )
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
    placement = Listed(
        listed=tuple(metadata.shards_metadata), shape=tuple(metadata.size), group=group
    )
    shards = [LocalShard(local, shard) for shard in placement.own_shards(local.device)]
    return assemble_by_metadata(shards, metadata, group, init_rrefs, spec)


def assemble_without_group(
    local_shards: list[LocalShard], metadata: ShardedTensorMetadata, spec: ShardingSpec | None
) -> ShardedTensor:
    """Put shards together that are all in this process."""
    _check_strided(metadata.tensor_properties)
    check_shards(metadata.shards_metadata, metadata.size)
    placement = Listed(
        listed=tuple(metadata.shards_metadata),
        shape=tuple(metadata.size),
        group=cast(Any, None),
        given_spec=spec,
        own=tuple(metadata.shards_metadata.index(shard.metadata) for shard in local_shards),
    )
    return _assembled(local_shards, placement, metadata.tensor_properties, init_rrefs=False)


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
        remote.share(tensor)
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

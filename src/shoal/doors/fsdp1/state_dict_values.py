"""Values of sharded state dicts: a whole tensor cut into rows, and put together again."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shoal._torch import sharded
from shoal.doors.fsdp1.tensor_parallel import rows_on_all_axes
from shoal.doors.sharded_tensor.from_local_shards import init_from_local_shards
from shoal.layout import Even, Packing, ParamSpec
from shoal.mesh import HSDPMeshInfo
from shoal.runtime.parameter_wrapping import dtensor_wrapping
from shoal.runtime.unit import Unit
from shoal.tensor.listed import Listed
from shoal.tensor.packed import Packed
from shoal.tensor.sharded import ShardedTensor


def cut_rows(unit: Unit, name: str, whole: torch.Tensor, *, use_dtensor: bool) -> torch.Tensor:
    """This rank's rows of a tensor that all ranks have, as a tensor over the ranks of a unit.

    The rows are those of `torch.chunk`, copied. Nothing is communicated, but on a part of a mesh.
    """
    if use_dtensor:
        on_all_axes = rows_on_all_axes(whole, unit.mesh_info)
        if on_all_axes is not None:
            return on_all_axes
    packing = Even((0,)).pack([ParamSpec.of(name, whole)], unit.size)
    piece = packing.piece(0, unit.rank)
    local = whole[piece.regions[0].slices] if piece.regions else whole.new_empty(piece.shape)
    if use_dtensor:
        return dtensor_wrapping(name, whole, 0, unit.mesh_info).shard(local.clone())
    return as_sharded(unit, packing, local.clone())


def as_sharded(unit: Unit, packing: Packing, local: torch.Tensor) -> ShardedTensor:
    """A `ShardedTensor` over a unit's ranks, from this rank's part of a packing's only parameter.

    Its shards stand alone, as torch's do: who gives one another tensor changes the whole.
    """
    assert unit.transport is not None
    info, group = unit.mesh_info, unit.transport.group
    packed = Packed(packing=packing, index=0, group=group, rank=unit.rank)
    placement = Listed(
        listed=tuple(packed.shards(local.device)),
        shape=packed.shape,
        group=group,
        replica=info.replicate_mesh_rank if isinstance(info, HSDPMeshInfo) else 0,
    )
    return ShardedTensor.of(local.view(placement.local_shapes[0]), placement)


def whole_of(value: Any, device: torch.device) -> Any:
    """The whole of a tensor that is spread over ranks, on a device; collective then.

    What is no such tensor is returned as it is.
    """
    if isinstance(value, DTensor):
        return cast(DTensor, value.to(device)).full_tensor()
    if not isinstance(value, sharded.TorchShardedTensor):
        return value
    if isinstance(value, ShardedTensor):
        return value.to(device).full_tensor()
    # torch's wrapper names ranks of the group in the placements, where others name global ones.
    place = sharded.RemoteDevice(f"rank:{dist.get_rank()}/{device}")
    shards = [
        sharded.LocalShard(
            shard.tensor.to(device),
            sharded.ShardMetadata(shard.metadata.shard_offsets, shard.metadata.shard_sizes, place),
        )
        for shard in value.local_shards()
    ]
    group = value._process_group
    return init_from_local_shards(shards, value.size(), process_group=group).full_tensor()

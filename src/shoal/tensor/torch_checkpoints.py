"""Answers to `torch.distributed.checkpoint` and torch's state-dict functions.

    write_items         an item for each region that this rank saves
    chunks              the regions that this rank loads: the same
    shard_at            its memory for one of them
    filled              a tensor that takes its elements from a full state dict

torch puts a region of a checkpoint together from whatever chunks were saved, so ours, torch's own
ShardedTensor and `DTensor` load one another's, on any number of ranks. Its functions for full state
dicts know `DTensor`, and take every other sharded tensor for chunks of dim 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shoal.layout.region import Region

if TYPE_CHECKING:
    from shoal.tensor.base import ShardedTensorBase


def write_items(tensor: ShardedTensorBase, name: str) -> list[WriteItem]:
    """An item for each region that this rank saves; of equal replicas, the first group saves."""
    if tensor.placement.replica > 0:
        return []
    properties = TensorProperties.create_from_tensor(tensor)
    # A tensor without elements is in the checkpoint too: all ranks say so, and torch takes one.
    regions = tensor.regions if tensor.numel() else (Region.whole(tensor.shape),)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(region.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(region), properties=properties, size=tensor.size()
            ),
        )
        for region in regions
    ]


def chunks(tensor: ShardedTensorBase) -> list[ChunkStorageMetadata]:
    """The regions that this rank loads."""
    return [_chunk(region) for region in tensor.regions]


def shard_at(tensor: ShardedTensorBase, index: MetadataIndex) -> Tensor:
    """This rank's memory for the region that begins where `index` says."""
    if index.offset is None:
        raise ValueError(
            f"'{index.fqn}' is a ShardedTensor, of which this rank has {len(tensor.regions)} "
            "regions, and no offset was provided to say which"
        )
    offsets = tuple(index.offset)
    for region, part in tensor.parts():
        if region.offsets == offsets:
            return part
    if tensor.numel() == 0 and not any(offsets):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    raise ValueError(
        f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}': this rank's shards "
        f"begin at {[region.offsets for region in tensor.regions]}"
    )


def _chunk(region: Region) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(region.offsets), sizes=torch.Size(region.sizes))


def filled(tensor: Tensor, whole: Tensor) -> Tensor:
    """The tensor, with this rank's elements of a whole one; allocated, if it was on meta."""
    with torch.no_grad():
        target = torch.empty_like(tensor, device=whole.device) if tensor.is_meta else tensor
        target.copy_(whole)
    return target

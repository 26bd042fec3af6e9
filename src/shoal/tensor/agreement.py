"""Agreement on shards that ranks bring along: one exchange, after which all ranks raise or none.

A rank whose own shards cannot be right says so in the exchange instead of staying away from it, so
that the others raise too and do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shoal._torch import sharded
from shoal._torch.sharded import LocalShard, ShardedTensorMetadata, TensorProperties

Said: TypeAlias = ShardedTensorMetadata | str | None
"""What a rank brings: shards, why they cannot be right, or none."""


def agreed_metadata(
    local_shards: list[LocalShard], shape: tuple[int, ...], group: ProcessGroup
) -> ShardedTensorMetadata:
    """Metadata of all ranks' shards, in the order of ranks: collective.

    Raises ValueError where shards of one rank are wrong, or where ranks disagree.
    """
    said: Said = None
    problem: ValueError | None = None
    try:
        said = _own_metadata(local_shards, shape, group)
    except ValueError as error:
        said, problem = str(error), error
    everyone: list[Any] = exchange(said, group)
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
    for question in _QUESTIONS:
        question.check(brought)
    first, *others = brought.values()
    for other in others:
        first.shards_metadata.extend(other.shards_metadata)
    return first


def exchange(value: Any, group: ProcessGroup) -> list[Any]:
    """Give every rank of a group what each of them has, in the order of ranks: collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True, slots=True)
class _Question:
    """Something that all ranks must answer alike."""

    name: str
    answer: Callable[[ShardedTensorMetadata], object]

    def check(self, brought: dict[int, ShardedTensorMetadata]) -> None:
        ranks: dict[str, list[int]] = {}
        for rank, metadata in brought.items():
            ranks.setdefault(str(self.answer(metadata)), []).append(rank)
        if len(ranks) > 1:
            found = ", ".join(f"{self.name}={said} on rank:{who}" for said, who in ranks.items())
            raise ValueError(
                f"ShardedTensor {self.name} property does not match from different ranks! "
                f"Found {found}: make it the same on all"
            )


_QUESTIONS = (
    _Question("global_size", lambda metadata: tuple(metadata.size)),
    _Question("dtype", lambda metadata: metadata.tensor_properties.dtype),
    _Question("layout", lambda metadata: metadata.tensor_properties.layout),
    _Question("requires_grad", lambda metadata: metadata.tensor_properties.requires_grad),
    _Question("memory_format", lambda metadata: metadata.tensor_properties.memory_format),
    _Question("pin_memory", lambda metadata: metadata.tensor_properties.pin_memory),
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

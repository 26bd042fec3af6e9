"""Tensors that say themselves how they are gathered, by torch's two hooks.

    shard.fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        -> (tensors to gather, metadata)
    shard.fsdp_post_all_gather(gathered, metadata, param_dtype, out=None)
        -> (full parameter, tensors whose memory it needs); with `out`, written there

A tensor subclass has them as methods; a plain shard can be given them before the first forward. An
older form of the first hook takes the mesh alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch

from shoal.errors import UsageError
from shoal.layout.chunk import chunk_with_empty
from shoal.layout.even import EvenPacking, pack_even
from shoal.layout.packing import Packing

BEFORE, AFTER = "fsdp_pre_all_gather", "fsdp_post_all_gather"
_ARGUMENTS = "mesh, outer_size, outer_stride, module, mp_policy"


def has_hooks(name: str, tensor: torch.Tensor) -> bool:
    """Whether a tensor has the hooks; refuses one without the other, and unknown signatures."""
    before, after = hasattr(tensor, BEFORE), hasattr(tensor, AFTER)
    # AssertionErrors, because torch answers these mistakes with one.
    if before != after:
        has, lacks = (BEFORE, AFTER) if before else (AFTER, BEFORE)
        raise AssertionError(
            f"parameter {name!r}: a {type(tensor).__name__} has {has} but no {lacks}; a tensor "
            "that says how it is gathered needs both"
        )
    if before:
        num_arguments(name, tensor)
    return before


def num_arguments(name: str, tensor: torch.Tensor) -> int:
    """How many arguments the hook before the gather takes: 1, or 5."""
    signature = inspect.signature(getattr(tensor, BEFORE))
    num = len(signature.parameters)
    if num not in (1, 5):
        raise AssertionError(
            f"parameter {name!r}: {BEFORE} of a {type(tensor).__name__} must take ({_ARGUMENTS}), "
            f"or the mesh alone, got {signature}"
        )
    return num


def has_hooks_before_sharding(name: str, tensor: torch.Tensor) -> bool:
    """Like `has_hooks`, for a parameter that has still to be cut."""
    found = has_hooks(name, tensor)
    if found and not hasattr(type(tensor), BEFORE):
        raise NotImplementedError(
            f"shoal: parameter {name!r} was given {BEFORE} before fully_shard, whose shards are "
            "other tensors; give the hooks to the local tensor of the shard, after fully_shard"
        )
    return found


@torch.no_grad()
def cut(
    name: str,
    tensor: torch.Tensor,
    *,
    dim: int,
    num_chunks: int,
    rank: int,
    place: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """A rank's chunk, made by the tensor's own operations; in memory for a whole chunk."""
    chunks = chunk_with_empty(tensor, num_chunks, dim)
    chunk, padded = chunks[rank], tensor.new_zeros(chunks[0].size())
    length = chunk.size(dim) if chunk.numel() else 0
    if length:
        padded.narrow(dim, 0, length).copy_(chunk)
    shard = place(padded).narrow(dim, 0, length)
    if not has_hooks(name, shard):
        raise UsageError(
            f"parameter {name!r}: a shard of a {type(tensor).__name__} came out as a "
            f"{type(shard).__name__}, which has no {BEFORE}; let its __torch_dispatch__ keep the "
            "class for split, new_zeros, slice, and moves between devices"
        )
    return shard


def without(packing: Packing, indices: Collection[int]) -> Packing:
    """The same packing, in which some parameters have no elements: they are not in its bytes."""
    if not indices:
        return packing
    if not isinstance(packing, EvenPacking):
        raise refusal(packing.params[min(indices)].name, f"a {type(packing).__name__}")
    params = [
        replace(param, shape=(*param.shape[:dim], 0, *param.shape[dim + 1 :]))
        if index in indices
        else param
        for index, (param, dim) in enumerate(zip(packing.params, packing.dims, strict=True))
    ]
    return pack_even(params, packing.dims, packing.world_size)


def refusal(name: str, combination: Any) -> NotImplementedError:
    """What to raise where the hooks cannot be honoured."""
    return NotImplementedError(
        f"shoal: parameter {name!r} says itself how it is gathered ({BEFORE}), which is not "
        f"supported with {combination}"
    )

"""Buffers: tensors put into, and taken out of, the bytes that a packing describes.

A shard buffer is one rank's, a gathered buffer is all ranks' one after another, section by section;
both are 1-D `uint8` tensors. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.errors import UsageError
from shoal.layout.packing import Packing
from shoal.layout.region import Region
from shoal.layout.spec import ParamSpec


def shard_of(packing: Packing, rank: int, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A rank's shard buffer, filled from full tensors; padding is zero."""
    _check_tensors(packing, tensors)
    device = tensors[0].device if tensors else None
    shard = torch.zeros(packing.shard_bytes, dtype=torch.uint8, device=device)
    with torch.no_grad():
        for tensor, local, piece in zip(
            tensors, shard_views(packing, rank, shard), packing.pieces(rank), strict=True
        ):
            for region, part in region_views(local, piece.regions):
                part.copy_(tensor[region.slices])
    return shard


def shard_views(packing: Packing, rank: int, shard: torch.Tensor) -> list[torch.Tensor]:
    """A rank's local tensors, as views of its shard buffer: one per parameter."""
    _check_buffer("shard", shard, packing.shard_bytes)
    return [
        _typed(shard, param.dtype, piece.offset_bytes, piece.numel).view(piece.shape)
        for param, piece in zip(packing.params, packing.pieces(rank), strict=True)
    ]


def region_views(
    local: torch.Tensor, regions: Sequence[Region]
) -> list[tuple[Region, torch.Tensor]]:
    """Each region with its part of a local tensor, in the region's shape."""
    if len(regions) == 1:
        return [(regions[0], local.view(regions[0].sizes))]
    flat, start = local.view(-1), 0
    found: list[tuple[Region, torch.Tensor]] = []
    for region in regions:
        stop = start + region.numel
        found.append((region, flat[start:stop].view(region.sizes)))
        start = stop
    return found


def full_tensors(packing: Packing, gathered: torch.Tensor) -> list[torch.Tensor]:
    """The full parameters in a gathered buffer: views where they lie in one run, else copies."""
    _check_buffer("gathered", gathered, packing.gathered_bytes)
    return [
        _full_tensor(packing, gathered, index, param) for index, param in enumerate(packing.params)
    ]


def gathered_rows(packing: Packing, gathered: torch.Tensor, index: int) -> torch.Tensor:
    """The gathered section of a parameter as a matrix of its dtype, with one row per rank."""
    dtype, num_rows = packing.params[index].dtype, packing.world_size
    section = packing.section_of(index)
    rows = gathered[num_rows * section.start : num_rows * section.stop].view(dtype)
    return rows.view(num_rows, len(section) // dtype.itemsize)


def _full_tensor(
    packing: Packing, gathered: torch.Tensor, index: int, param: ParamSpec
) -> torch.Tensor:
    offset_bytes = packing.gathered_offset(index)
    if offset_bytes is not None:
        return _typed(gathered, param.dtype, offset_bytes, param.numel).view(param.shape)
    full = torch.empty(param.shape, dtype=param.dtype, device=gathered.device)
    flat = full.view(-1)
    rows = gathered_rows(packing, gathered, index)
    for stripe in packing.stripes(index):
        stripe.of_full(flat).copy_(stripe.of_rows(rows))
    return full


def _typed(buffer: torch.Tensor, dtype: torch.dtype, offset_bytes: int, numel: int) -> torch.Tensor:
    return buffer[offset_bytes : offset_bytes + numel * dtype.itemsize].view(dtype)


def _check_buffer(what: str, buffer: torch.Tensor, num_bytes: int) -> None:
    if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (num_bytes,):
        raise UsageError(
            f"expected a {what} buffer of {num_bytes} uint8, got {tuple(buffer.shape)} "
            f"of {buffer.dtype}"
        )


def _check_tensors(packing: Packing, tensors: Sequence[torch.Tensor]) -> None:
    if len(tensors) != len(packing.params):
        raise UsageError(f"expected {len(packing.params)} tensors, got {len(tensors)}")
    for param, tensor in zip(packing.params, tensors, strict=True):
        if tuple(tensor.shape) != param.shape or tensor.dtype != param.dtype:
            raise UsageError(
                f"parameter {param.name!r} is {param.shape} of {param.dtype}, got a tensor of "
                f"{tuple(tensor.shape)} and {tensor.dtype}"
            )

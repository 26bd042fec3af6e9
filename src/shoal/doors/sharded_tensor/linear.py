"""`linear` with a sharded weight: ranks send their rows of the input to the weight's blocks.

    input ──columns of a block──▶ its holder: times the block ──▶ added into the output

Every rank has an input of its own and gets its own output, as on one device. Nobody sees the whole
weight. Cut along dim 0, a weight asks for all columns, and gives some features of the output; cut
along dim 1, it asks for some columns, and gives a part of every feature.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from shoal.doors.sharded_tensor.block_exchange import (
    Swaps,
    announce,
    check_matrix,
    held_by_rank,
    needs_gradient,
    own_blocks,
    place,
)
from shoal.layout.region import Region
from shoal.tensor.sharded import ShardedTensor

_REASON = "linear with a sharded weight"


def linear(input: Tensor, weight: ShardedTensor, bias: Tensor | None = None) -> Tensor:
    """Do as `torch.nn.functional.linear` does with the whole weight: collective."""
    _check_types(input, weight, bias)
    group, held = weight.placement.group, held_by_rank(weight)
    input, dtype = _cast(input, weight)
    rows = input.reshape(-1, weight.shape[1]) if input.dim() and _fits(input, weight) else input
    told = announce(
        [[rows.shape[0] if rows.dim() else 0]] * group.size(),
        _problem(input, weight, bias, dtype),
        group,
        weight.device,
        reason=_REASON,
    )
    num_rows = [number for (number,) in told]
    blocks = [(region, block.to(dtype)) for region, block in own_blocks(weight)]
    swaps = Swaps(group, _REASON)
    asked = swaps.swap(
        [[rows[:, region.slices[1]] for region in regions] for regions in held],
        [[number * region.sizes[1] for region, _ in blocks] for number in num_rows],
        rows,
        needs_gradient=needs_gradient(input),
    )
    answers = swaps.swap(
        _products(blocks, asked, num_rows),
        [[rows.shape[0] * region.sizes[0] for region in regions] for regions in held],
        rows,
        needs_gradient=needs_gradient(weight, input),
    )
    shape = rows.shape[0], weight.shape[0]
    everything = slice(None)
    output = place(
        [(everything, region.slices[0]) for regions in held for region in regions],
        [answer for row in answers for answer in row],
        shape,
        rows,
    ).view(*input.shape[:-1], weight.shape[0])
    return output if bias is None else output + bias.to(dtype)


def _products(
    blocks: list[tuple[Region, Tensor]], asked: list[list[Tensor]], num_rows: list[int]
) -> list[list[Tensor]]:
    """For each rank, its rows times each block of this one."""
    products: list[tuple[Tensor, ...]] = []
    for index, (region, block) in enumerate(blocks):
        rows = torch.cat([row[index].view(-1, region.sizes[1]) for row in asked])
        with torch.autocast(rows.device.type, enabled=False):
            products.append(functional.linear(rows, block).split(num_rows))
    return [[product[rank] for product in products] for rank in range(len(asked))]


def _cast(input: Tensor, weight: ShardedTensor) -> tuple[Tensor, torch.dtype]:
    """The input as autocast would have it, and the dtype of the product."""
    kind = input.device.type
    if not torch.is_autocast_enabled(kind) or not input.is_floating_point():
        return input, weight.dtype
    dtype = torch.get_autocast_dtype(kind)
    return input.to(dtype), dtype


def _check_types(input: object, weight: object, bias: object) -> None:
    if not isinstance(input, Tensor) or isinstance(input, ShardedTensor):
        raise TypeError(f"input needs to be torch.Tensor, this rank's own; got {type(input)}")
    if bias is not None and (not isinstance(bias, Tensor) or isinstance(bias, ShardedTensor)):
        raise TypeError(
            f"bias needs to be torch.Tensor, whole on every rank; got {type(bias)}: shard the "
            "weight alone"
        )
    check_matrix(weight)
    if bias is not None and bias.dim() != 1:
        raise ValueError(f"Bias needs to have exactly 1 dim, got {bias.dim()}")


def _fits(input: Tensor, weight: ShardedTensor) -> bool:
    return input.shape[-1] == weight.shape[1]


def _problem(
    input: Tensor, weight: ShardedTensor, bias: Tensor | None, dtype: torch.dtype
) -> Exception | None:
    """The mistake in the arguments of this rank, of which the other ranks know nothing."""
    if input.dim() == 0:
        return ValueError("Input needs to have at least 1 dim, got a single number")
    if not _fits(input, weight):
        return ValueError(
            f"Input dim: {input.shape[-1]} does not match appropriate weight dim: {weight.shape[1]}"
        )
    if input.dtype != dtype:
        return RuntimeError(f"expected an input of {dtype}, as the weight is, got {input.dtype}")
    if bias is not None and bias.shape[0] not in (1, weight.shape[0]):
        return ValueError(f"expected a bias of {weight.shape[0]} features, got {tuple(bias.shape)}")
    return None

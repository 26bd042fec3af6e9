"""Sharded tensors made from whole ones, on whatever ranks a test runs."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from shoal.layout import Block, Even, Flat, Layout, ParamSpec, Rows, Whole
from shoal.tensor import Packed, ShardedTensor

LAYOUTS: tuple[Layout, ...] = (Even(), Flat(), Rows(), Block(5), Whole())

SHAPES: tuple[tuple[int, ...], ...] = ((33, 19), (7,), (), (64, 16), (1,), (2, 3, 5), (0, 4))
"""Cut inside rows and between them, shorter than the world, a single number, nothing at all."""


def placements(shapes: Sequence[tuple[int, ...]], layout: Layout) -> list[Packed]:
    group = dist.group.WORLD
    assert group is not None
    specs = [
        ParamSpec(name=f"p{index}", shape=shape, dtype=torch.float32)
        for index, shape in enumerate(shapes)
    ]
    packing = layout.pack(specs, group.size())
    return [
        Packed(packing=packing, index=index, group=group, rank=group.rank())
        for index in range(len(shapes))
    ]


def sharded(tensors: Sequence[torch.Tensor], layout: Layout) -> list[ShardedTensor]:
    """This rank's part of each tensor, as the layout cuts them together."""
    found = []
    for tensor, placement in zip(
        tensors, placements([tuple(t.shape) for t in tensors], layout), strict=True
    ):
        own = [tensor.detach()[region.slices].reshape(-1) for region in placement.piece.regions]
        local = torch.cat(own) if own else tensor.detach().new_empty(0)
        found.append(ShardedTensor.of(local.view(placement.piece.shape), placement))
    return found


def parameters(tensors: Sequence[torch.Tensor], layout: Layout) -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in sharded(tensors, layout)]


def random_tensors(
    shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """The same values on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

"""The comparison of engines sees what it is there to see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from differential import SHOAL, Engine, check_engines_agree, in_full, stack, train
from harness import ranks

SHAPES = [(1,), (3,), (13, 8), (8, 13), (4, 2, 3), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@ranks(2, 4)
def test_whole_tensors_are_those_of_torch(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    values = [torch.randn(shape).mul(9).to(dtype) for shape in SHAPES for dtype in DTYPES]
    sharded = [distribute_tensor(value, mesh, [Shard(0)]) for value in values]
    others = [distribute_tensor(value, mesh, [Replicate()]) for value in values]
    seen = in_full({"sharded": sharded, "between": 3, "others": others, "plain": values})
    assert seen["between"] == 3
    for kind in ("sharded", "others", "plain"):
        for found, value in zip(seen[kind], values, strict=True):
            assert type(found) is torch.Tensor
            assert (found.dtype, found.stride()) == (value.dtype, value.stride())
            assert torch.equal(found, value)


def slightly_wrong(engine: Engine) -> list[Any]:
    """Training after which one element on one rank is off by one bit."""
    model = engine.shard(stack())
    seen = train(engine, model)
    if engine is SHOAL and dist.get_rank() == 1:
        bits = seen[-1]["parameters"]["first.weight"].to_local().view(torch.int32)
        bits[0, 0] ^= 1
    return seen


@ranks(2)
def test_one_bit_on_one_rank_is_seen() -> None:
    if dist.get_rank() == 1:
        with pytest.raises(AssertionError, match=r"first\.weight: _local_tensor"):
            check_engines_agree(slightly_wrong)
    else:
        check_engines_agree(slightly_wrong)

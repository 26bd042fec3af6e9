"""Transport on NCCL: the group's own methods, called directly and many times over."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from harness import nccl_ranks
from shoal._torch import collectives
from shoal.comm import Transport

NUMEL = 1 << 10


def world() -> Transport:
    group = dist.group.WORLD
    assert group is not None
    return Transport(group)


@nccl_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_prepared_gathers_read_their_shard_at_each_launch(
    world_size: int, dtype: torch.dtype
) -> None:
    transport = world()
    shard = torch.zeros(NUMEL, device="cuda").to(dtype)
    gathered = torch.zeros(NUMEL * world_size, device="cuda").to(dtype)
    gather = transport.prepare_all_gathers(gathered, [(gathered, shard)])
    for step in range(3):
        shard.copy_(torch.full((NUMEL,), float(step + transport.rank), device="cuda"))
        gather.launch().wait()
        rows = gathered.float().view(world_size, NUMEL)
        expected = torch.arange(world_size, device="cuda") + float(step)
        assert torch.equal(rows, expected.unsqueeze(1).expand_as(rows))


@nccl_ranks(2, 4)
@pytest.mark.parametrize("op", ["SUM", "AVG", "PREMUL_SUM"])
def test_prepared_reductions(world_size: int, op: str) -> None:
    transport = world()
    given = collectives.premultiplied_sum(0.5) if op == "PREMUL_SUM" else getattr(ReduceOp, op)
    factor = {"SUM": 1.0, "AVG": 1 / world_size, "PREMUL_SUM": 0.5}[op]
    whole = torch.zeros(NUMEL * world_size, device="cuda")
    piece, tensor = torch.zeros(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
    reduce = transport.prepare_all_reduce(tensor, given)
    for step in range(2):
        whole.fill_(step + transport.rank)
        tensor.fill_(step + transport.rank)
        expected = factor * sum(step + rank for rank in range(world_size))
        for pending in (transport.reduce_scatter(piece, whole, given), reduce.launch()):
            torch.testing.assert_close(pending.wait(), torch.full_like(piece, expected))

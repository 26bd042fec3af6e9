"""Transport on gloo: what it serves itself, against plain arithmetic."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from harness import ranks
from shoal.comm import Transport
from shoal.comm.reduction import reduce_in_order
from shoal.errors import RankError

NUMEL = 6


def contribution(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=generator) * 8).to(dtype)


def world() -> Transport:
    group = dist.group.WORLD
    assert group is not None
    return Transport(group)


@ranks(2, 4)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.complex64, torch.bool],
)
def test_movers_carry_every_dtype(dtype: torch.dtype, world_size: int) -> None:
    transport = world()
    shard = contribution(transport.rank, NUMEL, dtype)
    everyone = torch.cat([contribution(rank, NUMEL, dtype) for rank in range(world_size)])

    gathered = torch.empty(NUMEL * world_size, dtype=dtype)
    transport.all_gather(gathered, shard).wait()
    assert torch.equal(gathered.view(torch.uint8), everyone.view(torch.uint8))

    sent = shard.clone()
    transport.broadcast(sent, 1).wait()
    expected = contribution(1, NUMEL, dtype)
    assert torch.equal(sent.view(torch.uint8), expected.view(torch.uint8))

    # Rank r sends r + 1 elements of its own to everyone.
    counts = list(range(1, world_size + 1))
    pieces = [contribution(rank, counts[rank], dtype) for rank in range(world_size)]
    received = torch.empty(sum(counts), dtype=dtype)
    outgoing = torch.cat([pieces[transport.rank]] * world_size)
    transport.all_to_all(received, outgoing, counts, [counts[transport.rank]] * world_size).wait()
    assert torch.equal(received.view(torch.uint8), torch.cat(pieces).view(torch.uint8))


@ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_reduce_scatter_sums_in_rank_order(
    op: ReduceOp.RedOpType, dtype: torch.dtype, world_size: int
) -> None:
    transport = world()
    inputs = [contribution(rank, NUMEL * world_size, dtype) for rank in range(world_size)]
    output = torch.empty(NUMEL, dtype=dtype)
    transport.reduce_scatter(output, inputs[transport.rank], op).wait()

    expected = torch.empty(NUMEL * world_size, dtype=dtype)
    reduce_in_order(inputs, op, expected)
    assert torch.equal(output, expected.chunk(world_size)[transport.rank])


@ranks(2, 4)
def test_all_reduce_averages(world_size: int) -> None:
    transport = world()
    tensor = contribution(transport.rank, NUMEL, torch.float32)
    pending = transport.all_reduce(tensor, ReduceOp.AVG)
    assert pending.wait() is tensor
    mean = torch.stack([contribution(rank, NUMEL, torch.float32) for rank in range(world_size)])
    torch.testing.assert_close(tensor, mean.mean(0))
    assert pending.wait() is tensor, "waiting again must not divide again"
    torch.testing.assert_close(tensor, mean.mean(0))


@ranks(2)
def test_several_collectives_are_in_flight_at_once() -> None:
    transport = world()
    shards = [torch.full((3,), float(10 * index + transport.rank)) for index in range(4)]
    outputs = [torch.empty(6) for _ in shards]
    pendings = [
        transport.all_gather(output, shard, reason=f"gather {index}")
        for index, (output, shard) in enumerate(zip(outputs, shards, strict=True))
    ]
    for index, pending in reversed(list(enumerate(pendings))):
        assert pending.reason == f"gather {index}"
        expected = torch.tensor([10.0 * index, 10.0 * index + 1]).repeat_interleave(3)
        assert torch.equal(pending.wait(), expected)


@ranks(2)
def test_an_output_may_be_a_piece_of_the_input() -> None:
    transport = world()
    buffer = torch.arange(6.0) + transport.rank
    shard = buffer.chunk(2)[transport.rank]
    transport.reduce_scatter(shard, buffer).wait()
    assert torch.equal(shard, (2 * torch.arange(6.0) + 1).chunk(2)[transport.rank])


@ranks(2)
def test_a_rank_that_stays_away_is_an_error_that_names_its_reason() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    assert isinstance(group, dist.ProcessGroup)
    if group.rank() == 0:
        pending = Transport(group).all_reduce(torch.ones(1), reason="all-reduce of the loss")
        with pytest.raises(RankError, match="all-reduce of the loss failed while waiting"):
            pending.wait()
    dist.barrier()

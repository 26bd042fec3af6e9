"""Transport on gloo: what it serves itself, against plain arithmetic."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from harness import ranks
from shoal._torch import collectives
from shoal.comm import Transport, observer
from shoal.comm.reduction import reduce_in_order
from shoal.errors import RankError

pytestmark = pytest.mark.unsampled  # the number of ranks is what matters here

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


@ranks(2, 4)
@pytest.mark.parametrize("by", ["all_reduce", "reduce_scatter"])
def test_premultiplied_sums_that_gloo_lacks(by: str, world_size: int) -> None:
    transport = world()
    op = collectives.premultiplied_sum(0.25)
    inputs = [contribution(rank, NUMEL * world_size, torch.float32) for rank in range(world_size)]
    expected = torch.stack(inputs).sum(0) * 0.25
    tensor = inputs[transport.rank]
    if by == "all_reduce":
        torch.testing.assert_close(transport.all_reduce(tensor, op).wait(), expected)
    else:
        output = transport.reduce_scatter(torch.empty(NUMEL), tensor, op).wait()
        torch.testing.assert_close(output, expected.chunk(world_size)[transport.rank])


@ranks(2)
def test_prepared_collectives_follow_their_tensors() -> None:
    transport = world()
    shard, gathered, reduced = torch.zeros(3), torch.zeros(6), torch.zeros(3)
    gather = transport.prepare_all_gathers(gathered, [(gathered, shard)])
    for step in range(3):
        shard.fill_(10.0 * step + transport.rank)
        gather.launch().wait()
        assert gathered.tolist() == [10.0 * step] * 3 + [10.0 * step + 1] * 3
        assert (
            transport.reduce_scatter(reduced, gathered).wait().tolist()
            == [2 * (10.0 * step + transport.rank)] * 3
        )


@ranks(2)
def test_reductions_in_flight_do_not_share_memory() -> None:
    transport = world()
    transport.reduce_scatter(torch.empty(3), torch.zeros(6)).wait()  # leaves memory behind
    inputs = [torch.full((6,), float(10 * index + transport.rank)) for index in range(3)]
    outputs = [torch.empty(3) for _ in inputs]
    pendings = [
        transport.reduce_scatter(output, input)
        for output, input in zip(outputs, inputs, strict=True)
    ]
    dist.barrier()  # all have arrived
    for index, pending in enumerate(pendings):
        assert pending.wait().tolist() == [20.0 * index + 1] * 3


@ranks(2)
def test_collectives_in_inference_mode_leave_memory_that_training_can_use() -> None:
    transport = world()
    for mode in (True, False):
        with torch.inference_mode(mode):
            gathered = torch.empty(10)
            shard = torch.full((5,), float(transport.rank))
            transport.all_gather(gathered, shard).wait()
            assert gathered.tolist() == [0.0] * 5 + [1.0] * 5
            transport.reduce_scatter(shard, gathered).wait()
            assert shard.tolist() == [2.0 * transport.rank] * 5


@ranks(2)
def test_a_gather_is_hidden_from_autograd() -> None:
    transport = world()
    shard = torch.full((2,), float(transport.rank), requires_grad=True)
    gathered = torch.empty(4)
    transport.all_gather(gathered, shard).wait()
    assert not gathered.requires_grad
    assert gathered.tolist() == [0, 0, 1, 1]


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
        with observer.uncompared():
            pending = Transport(group).all_reduce(torch.ones(1), reason="all-reduce of the loss")
        with pytest.raises(RankError, match="all-reduce of the loss failed while waiting"):
            pending.wait()
    dist.barrier()

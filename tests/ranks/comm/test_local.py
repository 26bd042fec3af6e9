"""Ranks that are threads see what ranks that are gloo processes see."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from harness import ranks
from shoal._torch import collectives
from shoal.comm.local import run_local

pytestmark = pytest.mark.unsampled  # the number of ranks is what matters here


def mine(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Whole numbers that differ between ranks, so that reductions are exact in any order."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return (numbers % 5 + 3 * dist.get_rank() + 1).to(dtype)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def all_gather() -> list[Tensor]:
    outputs = [torch.zeros(2, 3) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, mine(2, 3))
    return outputs


def all_gather_flat() -> list[Tensor]:
    output = torch.zeros(3 * dist.get_world_size(), dtype=torch.bfloat16)
    collectives.gather_method(world())(output, mine(3, dtype=torch.bfloat16)).wait()
    return [output]


def all_gather_in_place() -> list[Tensor]:
    output = torch.zeros(4 * dist.get_world_size())
    shard = output.chunk(dist.get_world_size())[dist.get_rank()]
    shard.copy_(mine(4))
    collectives.gather_method(world())(output, shard).wait()
    return [output]


def reduce_scatter() -> list[Tensor]:
    outputs = []
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        output = torch.zeros(2)
        inputs = mine(2 * dist.get_world_size())
        collectives.scatter_method(world(), op)(output, inputs).wait()
        outputs.append(output)
    return outputs


def all_reduce() -> list[Tensor]:
    outputs = []
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        outputs.extend([mine(5), mine(5, dtype=torch.int64), mine(2, 2, dtype=torch.float64)])
        for output in outputs[-3:]:
            dist.all_reduce(output, op=op)
    for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        outputs.append(mine(5, dtype=torch.int32))
        dist.all_reduce(outputs[-1], op=op)
    return outputs


def broadcast_and_reduce() -> list[Tensor]:
    last = dist.get_world_size() - 1
    sent, reduced = mine(3), mine(3)
    dist.broadcast(sent, src=last)
    dist.reduce(reduced, dst=last)
    return [sent, reduced if dist.get_rank() == last else torch.zeros(3)]


def gather_and_scatter() -> list[Tensor]:
    size, at_root = dist.get_world_size(), dist.get_rank() == 1
    gathered = [torch.zeros(2) for _ in range(size)]
    dist.gather(mine(2), gathered if at_root else None, dst=1)
    dealt = torch.zeros(2)
    dist.scatter(dealt, [mine(2) + index for index in range(size)] if at_root else None, src=1)
    return [*gathered, dealt]


def all_to_all_uneven() -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = [rank + target for target in range(size)]
    received = [source + rank for source in range(size)]
    output = torch.zeros(sum(received), 2)
    dist.all_to_all_single(output, mine(sum(sent), 2), received, sent)
    return [output]


def messages() -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.zeros(3), torch.zeros(2)]
    works = [dist.irecv(tensor, (rank - 1) % size) for tensor in received]
    works += [dist.isend(tensor, (rank + 1) % size) for tensor in (mine(3), mine(2) * 7)]
    for work in works:
        assert work is not None
        work.wait()
    return received


def objects() -> list[object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank})
    sent: list[object] = [rank, "x" * rank]
    dist.broadcast_object_list(sent, src=1)
    dealt: list[object] = [None]
    dist.scatter_object_list(dealt, list(range(size)) if rank == 0 else None, src=0)
    return [gathered, sent, dealt]


def subgroups() -> list[Tensor]:
    size = dist.get_world_size()
    even, odd = dist.new_group(range(0, size, 2)), dist.new_group(range(1, size, 2))
    total = mine(2)
    dist.all_reduce(total, group=odd if dist.get_rank() % 2 else even)
    return [total]


@ranks(2, 4)
@pytest.mark.parametrize(
    "collective",
    [
        all_gather,
        all_gather_flat,
        all_gather_in_place,
        reduce_scatter,
        all_reduce,
        broadcast_and_reduce,
        gather_and_scatter,
        all_to_all_uneven,
        messages,
        objects,
        subgroups,
    ],
)
def test_threads_see_what_processes_see(
    collective: Callable[[], list[object]], world_size: int
) -> None:
    on_gloo = collective()
    on_threads = run_local(world_size, collective)[dist.get_rank()]
    assert len(on_threads) == len(on_gloo)
    for threads, gloo in zip(on_threads, on_gloo, strict=True):
        if isinstance(gloo, Tensor):
            assert isinstance(threads, Tensor)
            assert torch.equal(threads, gloo)
        else:
            assert threads == gloo


@ranks(2)
def test_thread_ranks_leave_the_process_group_of_their_process_alone() -> None:
    group = dist.group.WORLD
    assert run_local(3, dist.get_world_size) == [3, 3, 3]
    assert dist.group.WORLD is group
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2

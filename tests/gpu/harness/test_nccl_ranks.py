"""Several NCCL ranks on one GPU."""

import os

import pytest
import torch
import torch.distributed as dist

from harness import NCCL, RankFailed, nccl_ranks, on_ranks


@nccl_ranks(2, 4)
def test_all_gather(world_size):
    rank, numel = dist.get_rank(), 1 << 16
    mine = torch.arange(numel, device="cuda") + rank * numel
    everything = torch.empty(world_size * numel, dtype=mine.dtype, device="cuda")
    dist.all_gather_into_tensor(everything, mine)
    assert torch.equal(everything, torch.arange(world_size * numel, device="cuda"))


@nccl_ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduce_scatter(world_size, dtype):
    rank, numel = dist.get_rank(), 1 << 16
    full = torch.arange(world_size, device="cuda", dtype=dtype).repeat_interleave(numel) + rank
    mine = torch.empty(numel, device="cuda", dtype=dtype)
    dist.reduce_scatter_tensor(mine, full)
    expected = world_size * rank + sum(range(world_size))
    assert torch.equal(mine, torch.full_like(mine, expected))


@nccl_ranks(2)
def test_ranks_share_the_first_gpu_each_on_a_host_of_its_own(world_size):
    assert torch.cuda.current_device() == 0
    assert os.environ["LOCAL_RANK"] == "0"
    hosts: list[str | None] = [None] * world_size
    dist.all_gather_object(hosts, os.environ["NCCL_HOSTID"])
    assert len(set(hosts)) == world_size


@nccl_ranks(2)
def test_tensors_on_the_host_travel_too(world_size):
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [world_size] * 3


def reduce_in_a_new_group() -> float:
    group = dist.new_group(list(range(dist.get_world_size())))
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total, group=group)
    return total.item()


def test_groups_are_renewed_between_tests():
    for _ in range(2):
        assert on_ranks(2, reduce_in_a_new_group, setup=NCCL, timeout_s=120) == [2.0, 2.0]


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise RuntimeError("no more")
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    torch.cuda.synchronize()


def test_a_failing_rank_frees_those_that_wait_for_it():
    with pytest.raises(RankFailed, match="rank 1 of 2 failed: RuntimeError: no more") as caught:
        on_ranks(2, raise_on_one, setup=NCCL, timeout_s=120)
    assert "in raise_on_one" in caught.value.others[0]
    assert on_ranks(2, reduce_in_a_new_group, setup=NCCL, timeout_s=120) == [2.0, 2.0]

"""Groups of gloo with one worker thread, where torch would give them two."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from harness import ranks

CPU = torch.device("cpu")


def gloo_of(group: Any) -> Any:
    return group._get_backend(CPU)


@ranks(2)
def test_every_group_has_one_thread_and_its_own_timeout() -> None:
    default = dist.distributed_c10d._get_default_group()
    other = dist.new_group(timeout=timedelta(seconds=77))
    assert gloo_of(default).options._threads == gloo_of(other).options._threads == 1
    assert gloo_of(other).options._timeout == timedelta(seconds=77)


@ranks(2)
def test_coalesced_gathers_end_beside_others() -> None:
    group = dist.distributed_c10d._get_default_group()
    mine = torch.full((3,), float(dist.get_rank()))
    works: list[Any] = []
    gathered: list[list[list[torch.Tensor]]] = []
    sums: list[torch.Tensor] = []
    for _ in range(200):
        gathered.append([[torch.empty(3), torch.empty(3)] for _ in range(2)])
        sums.append(mine.clone())
        works.append(gloo_of(group).allgather_coalesced(gathered[-1], [mine, 2 * mine]))
        works.append(dist.all_reduce(sums[-1], async_op=True))
    for work in works:
        work.wait()
    for rows, total in zip(gathered, sums, strict=True):
        for rank, (once, twice) in enumerate(rows):
            assert once.tolist() == [float(rank)] * 3
            assert twice.tolist() == [2.0 * rank] * 3
        assert total.tolist() == [1.0] * 3

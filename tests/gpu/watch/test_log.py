"""The watchdog's log sees the collectives of the CUDA lanes begin and end, and stops nobody."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import nccl_ranks
from shoal._torch import cuda
from shoal.comm import observer
from shoal.errors import RankError
from shoal.layout import Even, Flat, Layout
from shoal.runtime.fully_shard import fully_shard
from shoal.watch import Watchdog, digest_of_collectives
from shoal.watch.log import ENDED, IN_STREAM, LoggedCollective, log_path, read_log

DIM = 64


class Pair(nn.Module):
    """Two equal blocks, in the order that a rank wants."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, order: str = "ab") -> torch.Tensor:
        for name in order:
            x = getattr(self, name)(x)
        return x


def shard(layout: Layout | None = None) -> Any:
    torch.manual_seed(0)
    model = Pair().cuda()
    for block in (model.a, model.b):
        fully_shard(block, layout=layout or Even())
    return fully_shard(model, layout=layout or Even())


def batch() -> torch.Tensor:
    return torch.randn(4, DIM, device="cuda")


def of_lanes(entries: list[LoggedCollective]) -> list[tuple[str, str]]:
    return [(entry.what, entry.state) for entry in entries if entry.state]


@nccl_ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_every_gather_and_reduction_is_in_the_log(layout: Layout, tmp_path: Path) -> None:
    model = shard(layout)
    with Watchdog(limit_s=60, folder=tmp_path) as watchdog:
        model(batch()).sum().backward()
        torch.cuda.synchronize()
        found = watchdog._log.entries()
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest_of_collectives())
        written = read_log(log_path(tmp_path, dist.get_rank()))
    assert of_lanes(found) == [
        ("the gather of unit 'a'", ENDED),
        ("the gather of unit 'b'", ENDED),
        ("the gather of unit 'b'", ENDED),
        ("the gather of unit 'a'", ENDED),
        ("the reduction of unit 'b'", ENDED),
        ("the reduction of unit 'a'", ENDED),
    ]
    assert written == found
    assert [entry.state for entry in written] == [entry.state for entry in found]
    assert len(set(digests)) == 1


@nccl_ranks(2)
def test_a_collective_that_has_not_ended_is_told_without_waiting_for_it(tmp_path: Path) -> None:
    model = shard()
    model(batch()).sum().backward()  # connects NCCL, loads kernels
    held_s = 1.0
    x = batch()
    torch.cuda.synchronize()
    dist.barrier()
    with Watchdog(limit_s=60, folder=tmp_path) as watchdog, torch.no_grad():
        cuda.spin(held_s * 1e6)  # compute, which gathers wait for
        start = time.monotonic()
        model(x)
        found = watchdog._log.entries()
        took_s = time.monotonic() - start
        torch.cuda.synchronize()
        later = watchdog._log.entries()
    assert of_lanes(found) == [
        ("the gather of unit 'a'", IN_STREAM),
        ("the gather of unit 'b'", IN_STREAM),
    ]
    assert "which its device has not ended" in str(found[-1])
    assert took_s < held_s / 2
    assert {state for _, state in of_lanes(later)} == {ENDED}


@nccl_ranks(2)
def test_lanes_compare_before_they_launch() -> None:
    """With `SHOAL_DEBUG=collectives` both ranks raise, and NCCL has not seen anything."""
    model = shard()
    rank = dist.get_rank()
    with (
        observer.comparing(limit_s=30),
        pytest.raises(RankError, match=r"the gather of unit '[ab]'.*the gather of unit '[ab]'"),
    ):
        model(batch(), "ab" if rank == 0 else "ba")

"""`SHOAL_DEBUG=collectives`: ranks that launch different collectives raise, and name each other."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from differential import seeded
from harness import ranks
from oracle import full
from shoal.comm import Transport, observer
from shoal.ddp.replicate import replicate
from shoal.errors import RankError
from shoal.fsdp import FullyShardedDataParallel
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.runtime.fully_shard import fully_shard

DIM = 6


class Pair(nn.Module):
    """Two equal blocks, in the order that a rank wants."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, order: str = "ab") -> dict[str, torch.Tensor]:
        return {name: getattr(self, name)(x) for name in order}


def shard(**options: Any) -> Any:
    model = seeded(Pair)
    for block in (model.a, model.b):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch() -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(dist.get_rank()))


@ranks(2, 4)
def test_gathers_of_equal_size_that_change_places(world_size: int) -> None:
    model = shard()
    rank = dist.get_rank()
    with observer.comparing(limit_s=20), pytest.raises(RankError) as caught:
        model(batch(), "ab" if rank < world_size - 1 else "ba")
    text = str(caught.value)
    assert "rank 0 is about to launch the gather of unit" in text
    assert f"rank {world_size - 1} the gather of unit" in text
    assert "'a'" in text
    assert "'b'" in text
    assert "in step 1" in text
    assert f"group {dist.group.WORLD.group_name}" in text  # pyright: ignore


@ranks(2)
def test_reductions_of_equal_size_that_change_places() -> None:
    """What went unnoticed before units were reduced in turn: here nobody asks for that."""
    model = shard(reshard_after_forward=False)
    rank = dist.get_rank()
    with observer.comparing(limit_s=20):
        loss = model(batch())["ab"[rank]].sum()
        with pytest.raises(RankError) as caught:
            loss.backward()
    text = str(caught.value)
    assert "rank 0 is about to launch the reduction of unit 'a'" in text
    assert "rank 1 the reduction of unit 'b'" in text


@ranks(2)
def test_a_gather_against_a_reduction() -> None:
    model = shard()
    rank = dist.get_rank()
    with observer.comparing(limit_s=20):
        outputs = model(batch())
        loss = (outputs["a"] + outputs["b"]).sum()
        with pytest.raises(RankError) as caught:
            loss.backward() if rank == 0 else model(batch())
    assert "rank 0" in str(caught.value)
    assert "rank 1" in str(caught.value)
    assert "step 2" in str(caught.value)


@ranks(2, fresh=True)
def test_a_rank_that_does_not_come() -> None:
    if dist.get_rank() == 1:
        return
    group = dist.group.WORLD
    assert group is not None
    with observer.comparing(limit_s=0.5), pytest.raises(RankError, match="rank 1 did not come to"):
        Transport(group).all_reduce(torch.ones(3), reason="the sum of something")


@ranks(2)
def test_sizes_are_compared() -> None:
    group = dist.group.WORLD
    assert group is not None
    with observer.comparing(limit_s=20), pytest.raises(RankError, match=r"3 of float32.*4 of"):
        Transport(group).all_reduce(torch.ones(3 + dist.get_rank()))


def trained(model: Any) -> list[torch.Tensor]:
    """Some steps, with what an engine has to offer in between."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        outputs = model(batch())
        (outputs["a"] * outputs["b"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(batch())
    return [p.detach().clone() for p in model.parameters()]


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Block(4), Whole()], ids=repr)
def test_ranks_that_agree_compute_the_same_bits(layout: Layout) -> None:
    expected = trained(shard(layout=layout))
    with observer.comparing(limit_s=20):
        got = trained(shard(layout=layout))
    for p, q in zip(expected, got, strict=True):
        assert torch.equal(full(p), full(q))


@ranks(4)
def test_replicas_agree_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    with observer.comparing(limit_s=20):
        trained(shard(mesh=mesh))


@ranks(2)
def test_wrappers_and_replicated_modules_agree_too() -> None:
    with observer.comparing(limit_s=20):
        trained(FullyShardedDataParallel(seeded(Pair)))
        trained(replicate(seeded(Pair)))


def test_the_environment_asks_for_it() -> None:
    code = "from shoal.comm import observer; print(observer.comparison is not None)"
    for value, expected in (("collectives", "True"), ("", "False")):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "SHOAL_DEBUG": value},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == expected

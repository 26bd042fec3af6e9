"""Experts that are dealt to ranks, and sharded, train as all of them in one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from harness import ranks
from oracle import full
from shoal import checkpoint as checkpoints
from shoal.errors import MeshError, UsageError
from shoal.experts import Experts, clip_grad_norm_, shard_experts
from shoal.fsdp import fully_shard

DIM, HIDDEN, NUM_EXPERTS = 8, 12, 4


class Layer(nn.Module):
    """A router of the best two, and experts."""

    def __init__(self, *, recomputes: bool = False, chooses_first: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS, bias=False)
        self.experts = Experts(NUM_EXPERTS, DIM, HIDDEN)
        self.recomputes = recomputes
        self.chooses_first = chooses_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        if self.chooses_first:
            chosen = torch.arange(2).expand_as(chosen)
        if self.recomputes:
            return x + checkpoint(self.experts, x, chosen, weights, use_reentrant=False)
        return x + self.experts(x, chosen, weights)


def network(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), Layer(**options), Layer(**options), nn.Linear(DIM, 3))


def sharded(shape: tuple[int, ...], names: tuple[str, ...], **options: Any) -> nn.Sequential:
    model = network(**options)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model[1:3]:
        shard_experts(layer.experts, mesh)  # pyright: ignore
        fully_shard(layer)
    return fully_shard(model)


def batches(step: int) -> list[torch.Tensor]:
    """Of all ranks, of different sizes."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(3 + rank, 2, DIM, generator=generator) for rank in range(dist.get_world_size())
    ]


def train(model: nn.Module, steps: int = 3, scale: float = 1.0, *, alone: bool = False) -> None:
    """Each rank on its own batch, or one process on all."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        mine = batches(step) if alone else [batches(step)[dist.get_rank()]]
        for batch in mine:
            (model(batch * scale).square().mean() / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()


def check_same(model: nn.Module, plain: nn.Module) -> None:
    for (name, q), (_, p) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(full(q.detach()), p.detach(), msg=lambda m, n=name: f"{n}: {m}")


SHAPES = [((2, 2), ("dp", "ep")), ((1, 4), ("dp", "ep")), ((4, 1), ("dp", "ep"))]


@ranks(4)
@pytest.mark.parametrize(("shape", "names"), SHAPES)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.sampled(1)
def test_weights_are_those_of_one_process(
    shape: tuple[int, ...], names: tuple[str, ...], recomputes: bool, world_size: int
) -> None:
    model, plain = sharded(shape, names, recomputes=recomputes), network()
    train(model)
    train(plain, alone=True)
    check_same(model, plain)


@ranks(4)
def test_replicas_of_experts(world_size: int) -> None:
    model, plain = sharded((2, 1, 2), ("replicate", "dp", "ep")), network()
    train(model)
    train(plain, alone=True)
    check_same(model, plain)


@ranks(2, 4)
def test_ranks_whose_experts_get_no_tokens(world_size: int) -> None:
    """Every token goes to the first two experts: the last rank computes nothing, and reduces."""
    model = sharded((1, world_size), ("dp", "ep"), chooses_first=True)
    plain = network(chooses_first=True)
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    train(model)
    train(plain, alone=True)
    check_same(model, plain)
    for (name, parameter), old in zip(plain.named_parameters(), before, strict=True):
        if "experts" in name:
            torch.testing.assert_close(parameter.detach()[2:], old[2:])


@ranks(4)
def test_checkpoints_reshard(world_size: int, tmp_path: Path) -> None:
    """Saved with two ranks to an expert axis, loaded with one, saved, loaded with four."""
    before: dict[str, torch.Tensor] = {}
    for number, shape in enumerate([(2, 2), (4, 1), (1, 4)]):
        model = sharded(shape, ("dp", "ep"))
        if number == 0:
            train(model)
        else:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            checkpoints.load(tmp_path / str(number - 1), dict(model.state_dict()))
        found = {name: full(p.detach()).clone() for name, p in model.named_parameters()}
        assert not before or all(torch.equal(before[name], p) for name, p in found.items())
        before = found
        checkpoints.save(tmp_path / str(number), dict(model.state_dict()), {})


@ranks(2)
def test_mistakes_are_named(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    with pytest.raises(UsageError, match="3 experts cannot be dealt equally to the 2 ranks"):
        shard_experts(Experts(3, 4, 4), mesh)
    with pytest.raises(MeshError, match="the axis 'experts'"):
        shard_experts(Experts(2, 4, 4), mesh, expert_axis="experts")
    experts = shard_experts(Experts(2, 4, 4), mesh)
    with pytest.raises(UsageError, match="was called on these experts before"):
        shard_experts(experts, mesh)
    with pytest.raises(UsageError, match="for each of them chosen experts"):
        experts(torch.ones(3, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))


@ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_clipping_over_both_meshes(world_size: int, norm_type: float) -> None:
    model, plain = sharded((2, 2), ("dp", "ep")), network()
    model(batches(0)[dist.get_rank()]).square().mean().backward()
    for batch in batches(0):
        (plain(batch).square().mean() / world_size).backward()
    found = clip_grad_norm_(model.parameters(), 0.01, norm_type)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    torch.testing.assert_close(found, expected)
    for q, p in zip(model.parameters(), plain.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(full(q.grad), p.grad)


@ranks(4)
def test_the_example(world_size: int) -> None:
    """Two ranks to an expert axis, two to a data axis: the unsharded model's losses."""
    path = Path(__file__).parents[3] / "examples" / "experts.py"
    spec = importlib.util.spec_from_file_location("experts_example", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = example.built(4)
    for block in model.blocks:
        shard_experts(block.experts, mesh)
        fully_shard(block)
    losses = torch.tensor(example.train(fully_shard(model), 4, [dist.get_rank()]))
    dist.all_reduce(losses)
    expected = torch.tensor(example.train(example.built(4), 4, range(world_size)))
    torch.testing.assert_close(losses / world_size, expected)

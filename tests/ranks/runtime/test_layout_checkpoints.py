"""Every layout trains like the unsharded model, through clips, saves, and loads on other worlds."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from harness import on_ranks, ranks
from oracle import Model, batches, build, full, loss_of, shard
from shoal.checkpoint import load_training, save_training
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.tensor import ShardedTensor

LAYOUTS: list[Layout] = [Flat(), Rows(), Block(5), Whole()]
MAX_NORM = 0.3
STEPS = 3

Named = dict[str, torch.Tensor]


def optimizer_of(model: nn.Module, kernel: str, lr: float = 1e-2) -> torch.optim.Optimizer:
    options: dict[str, Any] = {kernel: True}
    return torch.optim.AdamW(model.parameters(), lr=lr, **options)


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range, num: int, at: int) -> None:
    """Take some steps on part `at` of `num` of the same batches."""
    for whole, _ in batches(2 * STEPS, 0, 2)[steps.start : steps.stop]:
        loss_of(model, whole.chunk(num)[at]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert full(norm) > MAX_NORM, "the clip does something"
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: Model, optimizer: torch.optim.Optimizer) -> Named:
    """Whole parameters and optimizer state."""
    found: Named = {}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter).detach().clone()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}/{key}"] = full(value).clone()
    return found


def fresh(layout: Layout, kernel: str) -> tuple[Model, torch.optim.Optimizer]:
    """A model of other values, and an optimizer with another learning rate."""
    model = shard(build(), layout=layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    return model, optimizer_of(model, kernel, lr=1.0)


def save(folder: Path, layout: Layout, kernel: str) -> Named:
    """Train for half of the steps, and save through both doors."""
    model = shard(build(), layout=layout)
    optimizer = optimizer_of(model, kernel)
    assert all(isinstance(p, ShardedTensor) for p in model.parameters())
    train(model, optimizer, range(STEPS), dist.get_world_size(), dist.get_rank())
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "torch")
    save_training(folder / "shoal", model, optimizer, {})
    return state_of(model, optimizer)


def load(folder: Path, layout: Layout, kernel: str, saved: Named) -> Named:
    """Load what another number of ranks saved, and train for the rest of the steps."""
    into: Any = None
    for door in ("shoal", "torch"):
        for target in (Even(), layout):
            model, optimizer = fresh(target, kernel)
            if door == "shoal":
                load_training(folder / door, model, optimizer)
            else:
                weights, state = get_state_dict(model, optimizer)
                dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / door)
                set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
            assert optimizer.param_groups[0]["lr"] == 1e-2
            check_equal(state_of(model, optimizer), saved)
            into = model, optimizer
    model, optimizer = into
    train(model, optimizer, range(STEPS, 2 * STEPS), dist.get_world_size(), dist.get_rank())
    return state_of(model, optimizer)


def check_equal(found: Named, expected: Named) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def check_close(found: Named, expected: Named) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.sampled
@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_trained_saved_and_loaded_on_another_world(
    tmp_path: Path, layout: Layout, kernel: str, before: int, after: int
) -> None:
    plain = build()
    optimizer = optimizer_of(plain, kernel)
    train(plain, optimizer, range(STEPS), 1, 0)
    saved = on_ranks(before, save, tmp_path, layout, kernel)[0]
    check_close(saved, state_of(plain, optimizer))
    train(plain, optimizer, range(STEPS, 2 * STEPS), 1, 0)
    for found in on_ranks(after, load, tmp_path, layout, kernel, saved):
        check_close(found, state_of(plain, optimizer))


def save_replicas(folder: Path, layout: Layout) -> Named:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = shard(build(), layout=layout, mesh=mesh)
    optimizer = optimizer_of(model, "foreach")
    train(model, optimizer, range(STEPS), 4, dist.get_rank())
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / "torch")
    save_training(folder / "shoal", model, optimizer, {})
    return state_of(model, optimizer)


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_replicas_save_once_and_load_anywhere(tmp_path: Path, layout: Layout) -> None:
    saved = on_ranks(4, save_replicas, tmp_path, layout)[0]
    on_ranks(2, load, tmp_path, layout, "foreach", saved)
    metadata = dcp.FileSystemReader(tmp_path / "torch").read_metadata().state_dict_metadata
    for name, value in saved.items():
        key = f"optimizer.state.{name.replace('/', '.')}" if "/" in name else f"model.{name}"
        chunks: list[Any] = metadata[key].chunks  # pyright: ignore
        assert sum(chunk.sizes.numel() for chunk in chunks) == value.numel(), key


@ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_full_state_dicts(layout: Layout) -> None:
    model = shard(build(), layout=layout)
    optimizer = optimizer_of(model, "foreach")
    train(model, optimizer, range(2), 2, dist.get_rank())
    expected = state_of(model, optimizer)

    options = StateDictOptions(full_state_dict=True)
    weights: Any = get_model_state_dict(model, options=options)
    state: Any = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    for name, parameter in model.named_parameters():
        assert type(weights[name]) is torch.Tensor
        assert torch.equal(weights[name], full(parameter))
        for key, value in state[name].items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, expected[f"{name}/{key}"])

    for from_first in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_first)
        weights, moments = get_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )
        if from_first and dist.get_rank() > 0:
            weights, moments = {}, {}
        copy, copied = fresh(layout, "foreach")
        set_model_state_dict(copy, weights, options=options)
        set_optimizer_state_dict(copy, copied, moments, options=options)
        for parameter in copy.parameters():
            assert isinstance(parameter, ShardedTensor)
            assert isinstance(copied.state[parameter]["exp_avg"], ShardedTensor)
        check_equal(state_of(copy, copied), expected)

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    offloaded = get_model_state_dict(model, options=options)
    assert bool(offloaded) == (dist.get_rank() == 0)

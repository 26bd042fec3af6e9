"""Checkpoints of wrapped models: every way to wrap loads what every other way has saved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

import two_level_model
from harness import on_ranks
from shoal.checkpoint import load_training, save_training
from shoal.errors import CheckpointError
from shoal.fsdp import FullyShardedDataParallel, fully_shard

pytestmark = pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``")

ENGINES: dict[str, dict[str, Any] | None] = {
    "fully_shard": None,
    "flat": {},
    "original": {"use_orig_params": True},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD, "use_orig_params": True},
    "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
}


def build(engine: str, seed: int, width: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    options = ENGINES[engine]
    if options is None:
        return two_level_model.build(fully_shard, seed, width, 1)
    options = {"device_id": torch.device("cpu"), **options}
    if engine == "hybrid":
        sizes = (2, dist.get_world_size() // 2)
        options["device_mesh"] = init_device_mesh(
            "cpu", sizes, mesh_dim_names=("replicate", "shard")
        )
    return two_level_model.build(FullyShardedDataParallel, seed, width, 1, **options)


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return two_level_model.train(model, optimizer, num_steps=3)


def trained(engine: str, folder: Path) -> list[float]:
    model, optimizer = build(engine, seed=0)
    losses_of(model, optimizer)
    save_training(folder, model, optimizer, {"step": 3})
    return losses_of(model, optimizer)


def resumed(engine: str, folder: Path) -> tuple[list[float], Any]:
    model, optimizer = build(engine, seed=1)
    for group in optimizer.param_groups:
        group["betas"] = (0.1, 0.1)
    extra = load_training(folder, model, optimizer)
    assert optimizer.param_groups[0]["betas"] == two_level_model.BETAS
    return losses_of(model, optimizer), extra


def check_going_on(engine: str, others: Iterable[str], folder: Path) -> None:
    expected = on_ranks(2, trained, engine, folder)[0]
    for other in others:
        for losses, extra in on_ranks(4, resumed, other, folder):
            assert losses == pytest.approx(expected, rel=1e-5), other
            assert extra == {"step": 3}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_goes_on_from_another(engine: str, tmp_path: Path) -> None:
    """In a ring: all save the same format, so each loads what it would from any other."""
    names = [*ENGINES, *ENGINES]
    check_going_on(engine, [names[names.index(engine) + 1]], tmp_path / "saved")


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ENGINES)
def test_any_engine_goes_on_from_any_other(engine: str, tmp_path: Path) -> None:
    check_going_on(engine, ENGINES, tmp_path / "saved")


def refused(engine: str, folder: Path) -> tuple[str, bool]:
    """The error of loading into another model, and whether that left it as it was."""
    model, optimizer = build(engine, seed=1, width=6)
    losses_of(model, optimizer)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    moments = [s["exp_avg"].clone() for s in optimizer.state_dict()["state"].values()]
    with pytest.raises(CheckpointError) as raised:
        load_training(folder, model, optimizer)
    is_same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) and all(
        torch.equal(s["exp_avg"], m)
        for s, m in zip(optimizer.state_dict()["state"].values(), moments, strict=True)
    )
    return str(raised.value), is_same


@pytest.mark.parametrize("engine", ["flat", "original"])
def test_another_model_is_refused_on_all_ranks(engine: str, tmp_path: Path) -> None:
    on_ranks(2, trained, engine, tmp_path / "saved")
    for message, is_same in on_ranks(2, refused, engine, tmp_path / "saved"):
        assert "0.weight" in message
        assert is_same

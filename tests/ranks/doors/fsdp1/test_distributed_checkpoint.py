"""`get_state_dict` and its like with optimizers; checkpoints between engines and world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import two_level_model
from harness import on_ranks
from shoal.doors.fsdp1.state_dict_values import whole_of
from shoal.fsdp import FullyShardedDataParallel, fully_shard

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
WHOLE = StateDictOptions(full_state_dict=True)
ENGINES = ("torch wrapper", "shoal wrapper", "torch fully_shard", "shoal fully_shard")
KINDS = ("flat", "original", "mesh")
"""How a wrapper holds its parameters, and what its state dicts are made of."""


def build(engine: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    options: dict[str, Any] = {}
    if "wrapper" in engine:
        shard: Any = TorchWrapper if "torch" in engine else FullyShardedDataParallel
        options = {"device_id": CPU, "use_orig_params": kind != "flat"}
        if kind == "mesh":
            options["device_mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        shard = torch_fully_shard if "torch" in engine else fully_shard
    # At least one row for each rank: torch's wrapper cannot load without.
    return two_level_model.build(shard, seed, width=8, num_outputs=4, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return two_level_model.train(model, optimizer, num_steps=2)


def wholes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Everything by name, put together."""
    weights, states = get_state_dict(model, optimizer)
    found = {name: whole_of(value, CPU) for name, value in weights.items()}
    for name, state in states["state"].items():
        found |= {f"{name}.{kind}": whole_of(value, CPU) for kind, value in state.items()}
    return {name: value.clone() for name, value in found.items()}


def save(engine: str, kind: str, path: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, optimizer = build(engine, kind, seed=0)
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)
    return wholes(model, optimizer), train(model, optimizer)


def load(engine: str, kind: str, path: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    model, optimizer = build(engine, kind, seed=1)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    return wholes(model, optimizer), train(model, optimizer)


def check(saved: tuple[Any, Any], loaded: tuple[Any, Any], where: str) -> None:
    """Bit by bit what was saved; what follows, to rounding."""
    assert loaded[0].keys() == saved[0].keys(), where
    for name, value in saved[0].items():
        assert torch.equal(loaded[0][name], value), f"{where}: {name}"
    assert loaded[1] == pytest.approx(saved[1], rel=1e-5), where


@pytest.mark.parametrize("engine", ENGINES)
def test_checkpoints_of_one_engine_load_into_all_others(engine: str, tmp_path: Path) -> None:
    """On more ranks than those that saved; one of the two engines is shoal's wrapper."""
    for kind in KINDS if "wrapper" in engine else ("original",):
        path = tmp_path / kind
        saved = on_ranks(2, save, engine, kind, path)[0]
        for other in ENGINES if engine == "shoal wrapper" else ("shoal wrapper",):
            for other_kind in KINDS if other == "shoal wrapper" else ("original",):
                loaded = on_ranks(4, load, other, other_kind, path)[0]
                check(saved, loaded, f"{engine} {kind} into {other} {other_kind}")


def exchange(giver: str, taker: str, kind: str) -> None:
    """Whole state dicts, with the optimizer's, which no file stands between."""
    model, optimizer = build(giver, kind, seed=0)
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer, options=WHOLE)
    other, other_optimizer = build(taker, kind, seed=1)
    set_state_dict(
        other, other_optimizer, model_state_dict=weights, optim_state_dict=states, options=WHOLE
    )
    found, wanted = wholes(other, other_optimizer), wholes(model, optimizer)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("kind", KINDS)
def test_whole_state_dicts_in_both_directions(kind: str) -> None:
    for other in ENGINES:
        on_ranks(2, exchange, "shoal wrapper", other, kind)
        on_ranks(2, exchange, other, "shoal wrapper", kind)

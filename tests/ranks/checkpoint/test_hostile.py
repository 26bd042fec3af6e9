"""A manifest that somebody changed: every rank refuses it alike, and no rank's state changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness import on_ranks
from shoal.checkpoint import load_training, save_training
from shoal.checkpoint.manifest import NAME, sealed
from shoal.errors import CheckpointError
from shoal.fsdp import FullyShardedDataParallel, fully_shard
from shoal.layout import Flat, Rows

ENGINES = (
    *("even", "flat", "rows"),
    *(pytest.param(name, marks=pytest.mark.soak) for name in ("wrapper", "wrapper, original")),
)


def groups(content: dict[str, Any]) -> Any:
    return content["extra"]["optimizer"]["groups"][0]


def moment(content: dict[str, Any]) -> Any:
    return content["tensors"]["optimizer/1.weight/exp_avg"]


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "lr": lambda c: groups(c).update(lr="evil"),
    "betas": lambda c: groups(c).update(betas=[0.9]),
    "groups": lambda c: c["extra"]["optimizer"].update(groups={}),
    "values": lambda c: c["extra"]["optimizer"]["values"].update({"optimizer/evil/step": 1}),
    "kind": lambda c: c["extra"]["optimizer"]["values"].update({"optimizer/1.bias/x": "evil"}),
    "optimizer": lambda c: c["extra"].update(optimizer=None),
    "training": lambda c: c["extra"].update(training=[]),
    "state": lambda c: c["tensors"].pop("optimizer/1.weight/exp_avg"),
    "state of none": lambda c: c["tensors"].update({"optimizer/evil/exp_avg": moment(c)}),
    "generator": lambda c: c["tensors"].pop("random/torch"),
    "bytes": lambda c: next(iter(c["files"].values())).update(bytes=1 << 40),
    "shape": lambda c: moment(c).update(shape=[1 << 40], regions=[]),
}


def build(engine: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 2))
    if engine.startswith("wrapper"):
        options = {"device_id": torch.device("cpu"), "use_orig_params": "original" in engine}
        model[0] = FullyShardedDataParallel(model[0], **options)
        model = FullyShardedDataParallel(model, **options)
    else:
        layout = {"flat": Flat(), "rows": Rows()}.get(engine)
        for module in (model[0], model):
            fully_shard(module, **({} if layout is None else {"layout": layout}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def saved(engine: str, folder: Path) -> None:
    save_training(folder, *build(engine, 0), {})


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        value = getattr(value, "local", value)
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.detach().tolist() if isinstance(value, torch.Tensor) else value

    weights = [plain(p) for p in model.parameters()]
    states = [plain(s) for s in optimizer.state.values()]
    rates = [plain({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
    return repr((weights, states, rates, torch.get_rng_state().tolist()))


def refused(engine: str, folder: Path, good: str) -> dict[str, str]:
    """The errors by what was changed; each leaves this rank as it was, and the model usable."""
    model, optimizer = build(engine, 1)
    before = everything(model, optimizer)
    errors = {}
    for name in CHANGES:
        with pytest.raises(CheckpointError) as raised:
            load_training(folder / name, model, optimizer)
        assert everything(model, optimizer) == before, name
        errors[name] = str(raised.value)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.zero_grad()
    load_training(folder / good, model, optimizer)
    assert everything(model, optimizer) != before
    return errors


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_all_ranks_refuse_what_somebody_changed(
    engine: str, world_size: int, tmp_path: Path
) -> None:
    on_ranks(world_size, saved, engine, tmp_path / "good")
    for name, change in CHANGES.items():
        (tmp_path / name).mkdir()
        for path in (tmp_path / "good").glob("*.safetensors"):
            (tmp_path / name / path.name).write_bytes(path.read_bytes())
        content = json.loads((tmp_path / "good" / NAME).read_text())
        content.pop("checksum")
        change(content)
        (tmp_path / name / NAME).write_bytes(sealed(content))
    found = on_ranks(world_size, refused, engine, tmp_path, "good")
    for name in CHANGES:
        texts = {errors[name] for errors in found}
        assert len(texts) == 1, (name, texts)
    assert "'lr' of parameter group 0" in found[0]["lr"]

"""Muon and AdamW as one optimizer: the numbers of both, and one checkpoint."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from harness import ranks
from shoal import fully_shard
from shoal.checkpoint import load_training, save_training
from shoal.optim import AdamW, Muon
from shoal.optim.muon_with_adamw import MuonWithAdamW


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)  # pyright: ignore[reportReturnType]


def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return matrices, [p for p in model.parameters() if p.ndim < 2]


def together(model: nn.Module) -> MuonWithAdamW:
    matrices, vectors = parts(model)
    return MuonWithAdamW(matrices, [{"params": vectors, "weight_decay": 0.0}], lr=0.01)


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        loss = model(torch.randn(4, 6)).pow(2).mean() + model(torch.ones(4, 6)).std()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@ranks(2)
def test_steps_are_those_of_the_two(tmp_path: Path) -> None:
    ours = make_model()
    losses = train(ours, together(ours), steps=range(5))
    theirs = make_model()
    matrices, vectors = parts(theirs)
    muon = Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW([{"params": vectors, "weight_decay": 0.0}], lr=0.01)
    assert losses == train(theirs, muon, adamw, steps=range(5))
    assert losses[-1] < losses[0]


@ranks(2)
def test_a_checkpoint_brings_back_both(tmp_path: Path) -> None:
    model = make_model()
    optimizer = together(model)
    train(model, optimizer, steps=range(3))
    save_training(tmp_path / "saved", model, optimizer, {})
    expected = train(model, optimizer, steps=range(3, 6))
    again = make_model()
    resumed = together(again)
    load_training(tmp_path / "saved", again, resumed)
    assert train(again, resumed, steps=range(3, 6)) == expected


@ranks(2)
def test_a_state_dict_brings_back_both(tmp_path: Path) -> None:
    model = make_model()
    optimizer = together(model)
    train(model, optimizer, steps=range(3))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    state = deepcopy(optimizer.state_dict())  # else both would have the same momentum
    again = make_model()
    again.load_state_dict(weights)
    resumed = together(again)
    resumed.load_state_dict(state)
    assert train(again, resumed, steps=range(3, 6)) == train(model, optimizer, steps=range(3, 6))

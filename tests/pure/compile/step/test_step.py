"""`compile_step`: one graph that trains as the program written out does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shoal import compile_step
from shoal.compile.observe import records
from shoal.errors import UsageError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8)),
        *(nn.ReLU(), nn.Linear(8, 3)),
    )


def data(number: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(number)
    return torch.randn(rows, 6), torch.randn(rows, 3)


def written_out(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for name, one in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], one, msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_is_that_of_the_program(kind: str) -> None:
    """With clipping, buffers, and rates that a scheduler changes; one graph for all of it."""
    ours, theirs = network(), network()
    optimizers = [OPTIMIZERS[kind](model.parameters()) for model in (ours, theirs)]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers]
    step = compile_step(ours, functional.mse_loss, optimizers[0], max_norm=0.5)
    before = {one.number for one in records()}
    for number in range(6):
        x, y = data(number)
        loss = step(x, y)
        torch.testing.assert_close(loss, written_out(theirs, optimizers[1], x, y))
        assert_same(ours, theirs)
        for scheduler in schedulers:
            scheduler.step()
    assert step.num_graphs == 1
    assert len([one for one in records() if one.number not in before]) == 1
    assert step.why_not_replayed is not None
    assert all(parameter.grad is None for parameter in ours.parameters())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        for key, held in optimizers[1].state[b].items():
            torch.testing.assert_close(optimizers[0].state[a][key], held)


def test_other_shapes_modes_and_tensors_make_other_graphs() -> None:
    ours, theirs = network(), network()
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ours, theirs)
    ]
    step = compile_step(ours, functional.mse_loss, optimizers[0], max_norm=0.5)

    def both(number: int, rows: int = 4) -> None:
        x, y = data(number, rows)
        step(x, y)
        written_out(theirs, optimizers[1], x, y)
        assert_same(ours, theirs)

    both(0)
    both(1)
    both(2, rows=5)
    assert step.num_graphs == 2
    for model in (ours, theirs):
        model.eval()
    both(3)
    assert step.num_graphs == 3
    for model in (ours, theirs):
        model.load_state_dict({k: v.clone() * 0.5 for k, v in theirs.state_dict().items()})
    both(4)
    assert step.num_graphs == 3, "values are no constants"
    for model in (ours, theirs):
        with torch.no_grad():
            model[0].weight.data = torch.ones_like(model[0].weight)
    both(5)
    assert step.num_graphs == 1, "graphs of other memory are gone"
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[1].state_dict()))
    both(5)
    optimizers[0].param_groups[0]["weight_decay"] = 0.1
    optimizers[1].param_groups[0]["weight_decay"] = 0.1
    both(6)
    assert step.num_graphs == 2


def test_parts_of_the_data_one_after_another() -> None:
    ours, theirs = nn.Linear(6, 3), nn.Linear(6, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    step = compile_step(ours, functional.mse_loss, optimizers[0], accumulate=2)
    for number in range(3):
        x, y = data(number)
        step(x, y)
        for part in (slice(0, 2), slice(2, 4)):
            (functional.mse_loss(theirs(x[part]), y[part]) / 2).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert_same(ours, theirs)
    with pytest.raises(UsageError, match="cannot be cut"):
        step(*data(0, rows=3))


class Named(nn.Module):
    """Takes several inputs, and ties its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, *, scale: Tensor) -> Tensor:
        return self.head(self.frozen(self.embedding(tokens)) * scale)


def test_inputs_by_name_tied_and_frozen_parameters() -> None:
    torch.manual_seed(0)
    ours, theirs = Named(), Named()
    theirs.load_state_dict(ours.state_dict())
    frozen = ours.frozen.weight.clone()
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
        for m in (ours, theirs)
    ]
    step = compile_step(ours, functional.cross_entropy, optimizers[0])
    for number in range(3):
        tokens, scale = torch.arange(5) % (number + 2), torch.randn(6)
        step({"tokens": tokens, "scale": scale}, tokens)
        functional.cross_entropy(theirs(tokens, scale=scale), tokens).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert_same(ours, theirs)
    assert torch.equal(ours.frozen.weight, frozen)
    assert ours.head.weight is ours.embedding.weight


class Recomputing(nn.Module):
    """A block whose activations are computed again."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(6, 6), rate

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(
            lambda y: functional.dropout(self.layer(y).relu(), self.rate), x, use_reentrant=False
        )


def test_recomputation_without_random_numbers_and_never_with() -> None:
    """Numbers drawn again would be others: refused, since nothing would show it."""
    ours, theirs = Recomputing(0.0), Recomputing(0.0)
    theirs.load_state_dict(ours.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ours, theirs)]
    step = compile_step(ours, functional.mse_loss, optimizers[0])
    for number in range(2):
        x, _ = data(number)
        step(x, x)
        functional.mse_loss(theirs(x), x).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        assert_same(ours, theirs)
    model = Recomputing(0.5)
    step = compile_step(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(x, x)
    with pytest.raises(NotImplementedError, match=r"random (numbers|state)"):
        step(x, x)


def test_wrong_arguments_are_named() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="max_norm=0"):
        compile_step(model, functional.mse_loss, optimizer, max_norm=0)
    with pytest.raises(UsageError, match="accumulate=0"):
        compile_step(model, functional.mse_loss, optimizer, accumulate=0)
    with pytest.raises(UsageError, match=r"got a SGD. The order is compile_step\(model, loss_fn"):
        compile_step(model, optimizer, functional.mse_loss)  # pyright: ignore
    with pytest.raises(UsageError, match="an optimizer, got a function"):
        compile_step(model, functional.mse_loss, functional.mse_loss)  # pyright: ignore
    with pytest.raises(UsageError, match="a model, got a function"):
        compile_step(functional.mse_loss, functional.mse_loss, optimizer)  # pyright: ignore
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    step = compile_step(model, functional.mse_loss, stranger)
    step(*data(0))
    with pytest.raises(UsageError, match="not the model's"):
        step(*data(0))

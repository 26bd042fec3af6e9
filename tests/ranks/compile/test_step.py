"""`compile_step` on several ranks: averages, shards and norms are in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from harness import ranks
from shoal import compile_step, fully_shard, replicate
from shoal.compile.observe import records
from shoal.layout import Block, Even, Flat, Rows, Whole
from step_programs import whole
from zoo import Model, assert_same, batches, build

NORM = 0.3


def loss_fn(output: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), tokens.flatten())


def sharded(**options: Any) -> Model:
    model = build("tied transformer")
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def trained(model: nn.Module, *, compiles: bool) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = compile_step(model, loss_fn, optimizer, max_norm=NORM)
    for tokens in batches(6):
        if compiles:
            step(tokens, tokens)
            continue
        loss_fn(model(tokens), tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
    if compiles:
        assert step.num_graphs == 1
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


@ranks(2, timeout_s=180)
def test_replicas() -> None:
    ours = trained(replicate(build("batch norm")), compiles=True)
    assert records()[-1].num_collectives > 0
    assert_same(ours, trained(replicate(build("batch norm")), compiles=False), exact=False)


@ranks(2, timeout_s=180)
@pytest.mark.parametrize("options", [{}, {"layout": Flat()}], ids=["even", "flat"])
def test_shards(options: Any) -> None:
    ours = trained(sharded(**options), compiles=True)
    assert_same(ours, trained(sharded(**options), compiles=False), exact=False)


@pytest.mark.soak
@ranks(4, timeout_s=240)
def test_on_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours = trained(sharded(mesh=mesh), compiles=True)
    assert_same(ours, trained(sharded(mesh=mesh), compiles=False), exact=False)


@ranks(2, timeout_s=180)
def test_optimizers_of_whole_tensors_are_refused_on_shards() -> None:
    model = sharded()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    step = compile_step(model, loss_fn, optimizer)
    step._is_first = False
    (tokens,) = batches(1)
    with pytest.raises(NotImplementedError, match="Adafactor"):
        step(tokens, tokens)


class Idle(nn.Linear):
    """With a parameter that the loss does not depend on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(4, 4)
        self.idle = nn.Parameter(torch.ones(3, 2))


@ranks(2, timeout_s=180)
def test_parameters_that_the_loss_does_not_depend_on_stay() -> None:
    """Not even decayed, as a gradient of zero would have it."""
    model = fully_shard(Idle())
    step = compile_step(
        model,
        lambda output, _: output.square().mean(),
        torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5),
    )
    for _ in range(3):
        step(torch.ones(2, 4), None)
    assert step.num_graphs == 1
    assert torch.equal(model.idle.full_tensor(), torch.ones(3, 2))


LAYOUTS = {"even": Even(), "flat": Flat(), "rows": Rows(), "block": Block(3), "whole": Whole()}


class Pair:
    """A model that trains by `compile_step` beside one whose step is written out."""

    def __init__(
        self, build: Callable[[], Any], make: Any = torch.optim.AdamW, dtype: Any = torch.float32
    ) -> None:
        self.dtype = dtype
        self.models = [build(), build()]
        self.optimizers = [make(model.parameters(), lr=0.05) for model in self.models]
        self.step = compile_step(self.models[0], functional.mse_loss, self.optimizers[0])

    def train(self, steps: int = 1, rows: int = 4) -> None:
        model, optimizer = self.models[1], self.optimizers[1]
        for number in range(steps):
            torch.manual_seed(number * 10 + dist.get_rank())
            x = torch.randn(rows, 4, dtype=self.dtype)
            y = torch.randn(rows, 3, dtype=self.dtype)
            self.step(x, y)
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            self.check()

    def check(self) -> None:
        theirs = self.models[1].state_dict()
        for name, one in self.models[0].state_dict().items():
            torch.testing.assert_close(whole(one), whole(theirs[name]), msg=name)
        states = [
            [sorted(optimizer.state.get(p, {})) for p in model.parameters()]
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]
        assert states[0] == states[1]


def network(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), norm(5), nn.Tanh(), nn.Linear(5, 3))


def in_units(layout: Any) -> nn.Sequential:
    model = network(nn.LayerNorm)
    fully_shard(model[0], layout=layout)
    return fully_shard(model, layout=layout)


@ranks(2, 4, timeout_s=180)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("frozen_from", [0, 2])
def test_sharded_parameters_are_frozen_and_thawed(layout: str, frozen_from: int) -> None:
    """Without updates or state; unfrozen ones get theirs in a step as it is written."""
    pair = Pair(lambda: in_units(LAYOUTS[layout]))
    pair.train(frozen_from)
    for model in pair.models:
        model[0].weight.requires_grad_(False)
        model[3].requires_grad_(False)
    before = whole(pair.models[0][0].weight)
    pair.train(3)
    assert torch.equal(whole(pair.models[0][0].weight), before)
    for model in pair.models:
        model.requires_grad_(True)
    pair.train(3)
    assert pair.step.why_not_captured is None
    assert not torch.equal(whole(pair.models[0][0].weight), before)


class Recomputing(nn.Module):
    """A unit that computes a part of itself again in backward, or all of it, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self._compute, x, use_reentrant=False)
        return checkpoint(lambda y: self.down(self.up(y).tanh()), x, use_reentrant=False)

    def _compute(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


@ranks(2, 4, timeout_s=180)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reshards", [True, False])
def test_checkpoints_inside_of_units(layout: str, reshards: bool) -> None:
    def build() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Recomputing(), Recomputing(), nn.Linear(4, 3)).double()
        for block in model[:2]:
            fully_shard(block, layout=LAYOUTS[layout], reshard_after_forward=reshards)
        return fully_shard(model, layout=LAYOUTS[layout])

    pair = Pair(build, dtype=torch.float64)
    pair.train(4)
    assert pair.step.why_not_captured is None
    assert all(not p.is_meta and hasattr(p, "full_tensor") for p in pair.models[0].parameters())


class Again(nn.Module):
    """A cell that runs twice, and a last one that computes with the same weight."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.last, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        if is_tied:
            self.last.weight = self.cell.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.cell(x).tanh()
        return self.head(self.last(self.cell(x).tanh()).tanh())


@ranks(2, 4, timeout_s=180)
@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_modules_that_run_twice_and_tied_ones(layout: str, reshards: bool, is_tied: bool) -> None:
    def build() -> Any:
        model = Again(is_tied=is_tied).double()
        for block in (model.cell, model.last):
            fully_shard(block, layout=LAYOUTS[layout], reshard_after_forward=reshards)
        return fully_shard(model, layout=LAYOUTS[layout])

    pair = Pair(build, dtype=torch.float64)
    pair.train(4)
    assert pair.step.why_not_captured is None


@ranks(2, 4, timeout_s=180)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_that_were_left_full(layout: str) -> None:
    """By a forward without backward, a call of unshard(), or so that they stay after backward."""

    def leave_full(model: Any) -> None:
        model(torch.ones(2, 4))

    def unshard(model: Any) -> None:
        model.unshard()

    def keep(model: Any) -> None:
        model.set_reshard_after_backward(False)
        model(torch.ones(2, 4)).sum().backward()
        model.zero_grad()

    pair = Pair(lambda: in_units(LAYOUTS[layout]))
    for fill in (leave_full, unshard, keep):
        for _ in range(2):
            for model in pair.models:
                fill(model)
            pair.train(2)
            assert pair.step.why_not_captured is None
    assert pair.step.num_graphs == 2  # another choice of what stays full makes another


@ranks(2, timeout_s=180)
def test_evaluations_between_captured_steps_see_what_they_trained() -> None:
    pair = Pair(lambda: in_units(Even()), torch.optim.SGD)
    x = torch.ones(4, 4)
    for _ in range(4):
        pair.train()
        with torch.no_grad():
            torch.testing.assert_close(*(model(x) for model in pair.models))


@ranks(2, timeout_s=180)
def test_what_is_refused_is_refused_on_all_ranks() -> None:
    pair = Pair(lambda: in_units(Even()))
    pair.train(2)
    before = {name: one.clone() for name, one in pair.models[0].state_dict().items()}
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        handle = getattr(pair.models[0][0].weight, register)(lambda _: None)
        with pytest.raises(NotImplementedError, match=r"'0\.weight' has"):
            pair.train()
        handle.remove()
    pair.models[0].set_gradient_divide_factor(3.0)
    with pytest.raises(NotImplementedError, match="divide_factor"):
        pair.train()
    for name, one in pair.models[0].state_dict().items():
        assert torch.equal(whole(one), whole(before[name]))


@ranks(2, timeout_s=180)
def test_buffers_of_replicas_are_shared_though_evaluations_came_between() -> None:
    """A graph that is captured after an evaluation broadcasts them, and so does what follows."""
    pair = Pair(lambda: replicate(network()), torch.optim.SGD)
    pair.train(2)
    for rows in (5, 6, 5):
        for model in pair.models:
            model.eval()
            with torch.no_grad():
                model(torch.ones(4, 4))
            model.train()
        pair.train(2, rows)


@ranks(2, timeout_s=180)
def test_replicas_out_of_step_and_with_hooks_of_their_own() -> None:
    pair = Pair(lambda: replicate(network()), torch.optim.SGD)
    pair.train(2)
    for rows in (4, 5):
        with pair.models[0].no_sync(), pair.models[1].no_sync():
            pair.train(1, rows)
    pair.models[0].register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(NotImplementedError, match="communication hook"):
        pair.train()

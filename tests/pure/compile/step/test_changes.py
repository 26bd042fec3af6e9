"""What a user changes between steps: `compile_step` follows, or refuses by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal import compile_step
from shoal.compile.step import compile_step as module_of_steps
from shoal.errors import UsageError

Make = Callable[[Any], torch.optim.Optimizer]

SGD: Make = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1)  # noqa: E731
ADAMW: Make = lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5)  # noqa: E731


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 3))


def data(rows: int = 4) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, 6), torch.randn(rows, 3)


class Pair:
    """A model that trains by `compile_step` beside one whose step is written out."""

    def __init__(self, make: Make, build: Callable[[], Any] = network) -> None:
        self.models = [build(), build()]
        self.optimizers = [make(model.parameters()) for model in self.models]
        self.step = compile_step(self.models[0], functional.mse_loss, self.optimizers[0])

    def train(self, steps: int = 1, rows: int = 4) -> None:
        x, y = data(rows)
        model, optimizer = self.models[1], self.optimizers[1]
        for _ in range(steps):
            torch.manual_seed(3)
            self.step(x, y)
            torch.manual_seed(3)
            optimizer.zero_grad()
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            self.check()

    def check(self) -> None:
        for (name, one), other in zip(
            self.models[0].state_dict().items(), self.models[1].state_dict().values(), strict=True
        ):
            torch.testing.assert_close(one, other, msg=name)
        states = [
            [sorted(optimizer.state.get(p, {})) for p in model.parameters()]
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]
        assert states[0] == states[1]
        assert len(self.optimizers[0].state) == len(self.optimizers[1].state)


@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("frozen_from", [0, 1, 2, 3])
def test_frozen_parameters_stay_and_thawed_ones_train(make: Make, frozen_from: int) -> None:
    """Not even decayed, and without state, as long as they never had a gradient."""
    pair = Pair(make)
    pair.train(frozen_from)
    for model in pair.models:
        model[0].requires_grad_(False)
    before = pair.models[0][0].weight.clone()
    pair.train(3)
    assert torch.equal(pair.models[0][0].weight, before)
    for model in pair.models:
        model[0].requires_grad_(True)
    pair.train(3)
    assert not torch.equal(pair.models[0][0].weight, before)


class Recurrent(nn.Module):
    """An LSTM, whose operator on CPU depends on whether autograd records."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.LSTM(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


def test_a_recurrent_layer_trains() -> None:
    Pair(ADAMW, Recurrent).train(4)


def test_a_first_step_that_raises_leaves_nothing_behind() -> None:
    pair = Pair(ADAMW)
    with pytest.raises(RuntimeError):
        pair.step(torch.ones(4, 5), torch.ones(4, 3))
    assert not pair.optimizers[0].state
    pair.train(3)
    with pytest.raises(RuntimeError):
        pair.step(torch.ones(4, 5), torch.ones(4, 3))
    pair.train(2)
    assert pair.step.num_graphs == 1


@pytest.mark.parametrize("make", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_groups_that_are_added_midway_train(make: Make) -> None:
    pair = Pair(lambda parameters: make(list(parameters)[:2]))  # those of the first layer
    pair.train(3)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.2})
    pair.train(3)


def test_parameters_without_gradients_get_no_state() -> None:
    class Partly(nn.Linear):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(6, 3)
            self.idle = nn.Parameter(torch.ones(2))

    pair = Pair(ADAMW, Partly)
    pair.train(4)
    assert pair.models[0].idle not in pair.optimizers[0].state
    assert torch.equal(pair.models[0].idle, torch.ones(2))


def test_numbers_of_modules_select_graphs() -> None:
    pair = Pair(SGD)
    pair.train(2)
    for p in (0.5, 0.25, 0.5):
        for model in pair.models:
            model[1].p = p
        pair.train(2)
    assert pair.step.num_graphs == 3
    for model in pair.models:
        model[1].eval()
    pair.train(2)


def test_replaced_modules_and_classes_are_noticed() -> None:
    pair = Pair(SGD)
    pair.train(2)
    for model in pair.models:
        model[2] = nn.ReLU()
    pair.train(2)
    for model in pair.models:
        model[2].__class__ = nn.Tanh
    pair.train(2)
    for model in pair.models:
        model[2].forward = torch.sin
    pair.train(2)
    for model in pair.models:
        model.append(nn.Hardtanh(-0.1, 0.1))
    pair.train(2)


def test_hooks_on_modules_are_part_of_the_graph_while_they_are_there() -> None:
    pair = Pair(SGD)
    pair.train(2)
    factor = [2.0]
    handles = [
        model[0].register_forward_hook(lambda _, __, output: output * factor[0])
        for model in pair.models
    ]
    pair.train(2)
    factor[0] = 3.0
    pair.train(2)
    for handle in handles:
        handle.remove()
    pair.train(2)
    for model in pair.models:
        model[3].register_full_backward_hook(lambda _, grads, __: (grads[0] * 2,))
    pair.train(2)


def test_a_hook_or_forward_that_remembers_is_refused_before_anything_changes() -> None:
    """A captured step would not repeat it. Fake tensors are not left behind."""
    calls: list[Tensor] = []
    model = network()
    optimizer = ADAMW(model.parameters())
    step = compile_step(model, functional.mse_loss, optimizer)
    step(*data())
    model[0].register_forward_hook(lambda _, __, output: calls.append(output))
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(NotImplementedError, match=r"calls, in the closure of .* empty"):
        step(*data())
    assert calls == []
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[0][name])
    for number, held in before[1].items():
        now = optimizer.state_dict()["state"][number]
        assert all(torch.equal(one, now[key]) for key, one in held.items())

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) / self.calls

    model = Counting(6, 3)
    step = compile_step(model, functional.mse_loss, SGD(model.parameters()))
    step(*data())
    with pytest.raises(NotImplementedError, match="calls was 1 and is"):
        step(*data())
    assert model.calls == 1


@pytest.mark.parametrize("after", [0, 1, 3])
def test_hooks_on_parameters_are_refused_by_name(after: int) -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        pair = Pair(SGD)
        pair.train(after)
        before = copy.deepcopy(pair.models[0].state_dict())
        handle = getattr(pair.models[0][3].weight, register)(lambda _: None)
        with pytest.raises(NotImplementedError, match=r"'3\.weight' has .*lambda"):
            pair.step(*data())
        assert all(torch.equal(before[k], v) for k, v in pair.models[0].state_dict().items())
        handle.remove()
        pair.train(3)


@pytest.mark.parametrize("after", [0, 3])
def test_hooks_on_the_step_of_the_optimizer_are_refused_by_name(after: int) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    pair = Pair(SGD)
    pair.train(after)
    for register in (
        pair.optimizers[0].register_step_post_hook,
        register_optimizer_step_pre_hook,
    ):
        handle = register(lambda *_: None)
        with pytest.raises(NotImplementedError, match="lambda"):
            pair.step(*data())
        handle.remove()
    pair.train(2)
    pair.optimizers[0].step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(NotImplementedError, match="lambda"):
        pair.step(*data())


def test_the_dtype_of_autocast_selects_a_graph() -> None:
    pair = Pair(SGD)
    pair.train(2)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16) * 2:
        with torch.autocast("cpu", dtype):  # for a step each: its cache keeps weights from before
            pair.train()
    assert pair.step.num_graphs == 3


def test_without_gradients_and_under_modes() -> None:
    pair = Pair(SGD)
    pair.train(2)
    with torch.no_grad(), pytest.raises(UsageError, match="no_grad"):
        pair.step(*data())
    with torch.device("cpu"):
        pair.train()
        assert pair.step.why_not_captured is not None
    pair.train()
    assert pair.step.why_not_captured is None


@pytest.mark.parametrize("kind", ["Adafactor", "LBFGS"])
def test_optimizers_that_cannot_be_captured_are_named_at_once(kind: str) -> None:
    model = network()
    step = compile_step(
        model, functional.mse_loss, getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    )
    with pytest.raises(NotImplementedError, match=kind):
        step(*data())


class Counts(torch.optim.Optimizer):
    """Of somebody's own: it replaces its state, and may count in Python."""

    def __init__(self, params: Any, *, in_python: bool) -> None:
        self.in_python, self.factor = in_python, 0.5
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["mean"] = state.get("mean", torch.zeros_like(p)) * self.factor + p.grad
                    if self.in_python:
                        state["count"] = state.get("count", 0) + 1
                    p.sub_(state["mean"] * group["lr"])


def test_optimizers_of_ones_own() -> None:
    """State that is replaced is kept; numbers that count are refused."""
    pair = Pair(lambda p: Counts(p, in_python=False))
    pair.train(4)
    model = network()
    step = compile_step(model, functional.mse_loss, Counts(model.parameters(), in_python=True))
    step(*data())
    with pytest.raises(NotImplementedError, match=r"Counts.*'count' of its state"):
        step(*data())


def test_numbers_that_change_in_every_step_make_few_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A scheduler of momentum: the bound is told once, and every step is right."""
    pair = Pair(ADAMW)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=40)
        for optimizer in pair.optimizers
    ]
    limit = module_of_steps.MAX_GRAPHS
    for _ in range(limit + 8):
        pair.train()
        for scheduler in schedulers:
            scheduler.step()
    (told,) = caplog.messages
    assert "param_groups[0]['betas'] was" in told
    assert pair.step.num_graphs == limit
    assert "betas" in str(pair.step.why_not_captured)
    pair.train(2)  # not in every step any more
    assert pair.step.why_not_captured is None


def test_memory_that_changes_in_every_step_is_not_captured_without_end() -> None:
    pair = Pair(SGD)
    for _ in range(module_of_steps.MAX_GRAPHS + 4):
        for model in pair.models:
            model[0].weight.data = model[0].weight.data.clone()
        pair.train()
    assert pair.step.why_not_captured is not None
    pair.train(2)
    assert pair.step.why_not_captured is None


def test_many_shapes_have_graphs_of_their_own() -> None:
    pair = Pair(SGD)
    for rows in range(2, module_of_steps.MAX_GRAPHS + 5):
        pair.train(rows=rows)
    assert pair.step.num_graphs == module_of_steps.MAX_GRAPHS + 2


def test_data_is_told_apart() -> None:
    """One tensor twice, a gradient asked for, memory of the model, and what cannot be seen."""
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    step = compile_step(model, functional.mse_loss, optimizers[0])
    x = torch.randn(3, 3)
    for a, b in ((x, x), (x, x), (x, -x), (x[:2], x[1:]), (x[:2], -x[:2])):
        step(a, b)
        functional.mse_loss(other(a), b).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        torch.testing.assert_close(model.weight, other.weight)
    with pytest.raises(UsageError, match="requires a gradient"):
        step(x.clone().requires_grad_(), x)
    with pytest.raises(NotImplementedError, match="Data among its inputs"):
        step(Data(), x)
    step(model.weight.detach(), x)
    assert step.why_not_captured is not None


class Data:
    """Something that might hold tensors."""


def test_tensors_and_numbers_that_code_reads() -> None:
    """Closures, attributes and classes; tensors among them are inputs of the graph."""
    weights, power = torch.ones(3), [2]

    def loss_fn(output: Tensor, wanted: Tensor) -> Tensor:
        return ((output - wanted).abs() ** power[0] * weights).mean()

    models = [network(), network()]
    optimizers = [SGD(model.parameters()) for model in models]
    step = compile_step(models[0], loss_fn, optimizers[0])

    def both() -> None:
        x, y = data()
        step(x, y)
        optimizers[1].zero_grad()
        loss_fn(models[1](x), y).backward()
        optimizers[1].step()
        torch.testing.assert_close(models[0][0].weight, models[1][0].weight)

    both()
    both()
    weights.mul_(3)
    both()
    assert step.num_graphs == 1
    weights = torch.full((3,), 0.5)
    both()
    power[0] = 3
    both()
    assert step.num_graphs == 3


def test_losses_that_are_modules() -> None:
    model, other = network(), network()
    weights = torch.tensor([1.0, 2.0, 3.0])
    loss = nn.CrossEntropyLoss(weight=weights)
    optimizers = [SGD(one.parameters()) for one in (model, other)]
    step = compile_step(model, loss, optimizers[0])
    x, _ = data()
    for smoothing in (0.0, 0.0, 0.1):
        loss.label_smoothing = smoothing
        step(x, torch.arange(4) % 3)
        optimizers[1].zero_grad()
        loss(other(x), torch.arange(4) % 3).backward()
        optimizers[1].step()
        torch.testing.assert_close(model[0].weight, other[0].weight)


def test_buffers_that_forward_replaces_and_gradients_from_before() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
            return self.layer(x - self.mean)

    pair = Pair(SGD, Mean)
    pair.train(4)
    pair.models[0].layer.weight.grad = torch.ones(3, 6)
    pair.train()
    assert pair.models[0].layer.weight.grad is None


def test_recurrent_layers_read_the_parameters_of_the_graph() -> None:
    """They keep a list of their parameters beside the parameters themselves."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__()
            self.cells, self.head = nn.GRU(6, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cells(x)[0])

    Pair(SGD, Recurrent).train(4)


def test_values_read_on_the_host_are_refused_in_plain_words() -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    model = Branching(6, 3)
    step = compile_step(model, functional.mse_loss, SGD(model.parameters()))
    step(*data())
    with pytest.raises(NotImplementedError, match="on the host"):
        step(*data())


def test_signs_of_zeros_among_the_inputs_select_graphs_and_nans_do_not() -> None:
    class Signed(nn.Linear):
        def forward(self, x: Tensor, sign: float) -> Tensor:
            return super().forward(x) * math.copysign(1.0, sign)

    models = [Signed(6, 3), Signed(6, 3)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [SGD(model.parameters()) for model in models]
    step = compile_step(models[0], functional.mse_loss, optimizers[0])
    x, y = data()
    for sign in (0.0, 0.0, -0.0, -0.0, 0.0, float("nan"), float("nan"), float("nan")):
        step((x, sign), y)
        optimizers[1].zero_grad()
        functional.mse_loss(models[1](x, sign), y).backward()
        optimizers[1].step()
        torch.testing.assert_close(models[0].weight, models[1].weight)
    assert step.num_graphs == 3


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomalies_are_found_while_they_are_looked_for() -> None:
    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mul(0).sqrt() * 0

    model = Root(6, 3)
    step = compile_step(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(3):
        step(*data())
    assert step.num_graphs == 1
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(RuntimeError, match="returned nan values"):
            step(*data())
    assert step.why_not_captured == "torch.autograd.set_detect_anomaly is on"

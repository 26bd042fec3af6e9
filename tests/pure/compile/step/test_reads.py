"""What code of a step reads from far away: `compile_step` notices that it changed, or refuses."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import operator
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_full_backward_hook,
)

from shoal import compile_step

scale = 1.0
variable = ContextVar("variable", default=1.0)
local = threading.local()
counter = itertools.count()
read_gain = operator.attrgetter("gain")


class Config:
    """A class that serves as a namespace."""

    value = 1.0
    last: Tensor | None = None


class Shared:
    value = 1.0


class Derived(Shared):
    pass


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * scale


class Helper:
    def __init__(self) -> None:
        self.factor = scale

    def times(self, x: Tensor) -> Tensor:
        return x * self.factor


@torch.no_grad()
def shift(x: Tensor) -> Tensor:
    return x * scale


@dataclass(slots=True)
class Slots:
    value: float = 1.0


class Net(nn.Module):
    """A layer, and a function after it that reads something."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.read = nn.Linear(4, 4), read
        self.gain, self.flag, self.slots = 1.0, 1, Slots()
        self.factors = {"add": 1.0, "multiply": 3.0}
        self.zero, self.zeros, self.complex_zero = 0.0, [1.0, 0.0], 0j
        self.last, self.rows = torch.zeros(2, 4), [torch.zeros(2, 4)]
        self.own = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, self.layer(x))


def with_default(model: Any, h: Tensor, *, factor: float = 1.0) -> Tensor:
    return h * factor


def in_order(model: Any, h: Tensor) -> Tensor:
    for kind, factor in model.factors.items():
        h = h + factor if kind == "add" else h * factor
    return h


def by_sign(value: float, h: Tensor) -> Tensor:
    return h * math.copysign(2.0, value)


def set_scale(_: Any) -> None:
    global scale
    scale = 3.0


def set_defaults(_: Any) -> None:
    with_default.__kwdefaults__ = {"factor": 3.0}


def reorder(model: Any) -> None:
    model.factors["add"] = model.factors.pop("add")


READS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], Any]]] = {
    "class": (lambda _, h: h * Config.value, lambda _: setattr(Config, "value", 3.0)),
    "base class": (lambda _, h: h * Derived.value, lambda _: setattr(Shared, "value", 3.0)),
    "derived class": (lambda _, h: h * Derived.value, lambda _: setattr(Derived, "value", 3.0)),
    "autograd function": (lambda _, h: Scaled.apply(h), set_scale),
    "object made inside": (lambda _, h: Helper().times(h), set_scale),
    "decorated function": (lambda _, h: h + shift(h), set_scale),
    "vars": (lambda model, h: h * vars(model)["gain"], lambda model: setattr(model, "gain", 3.0)),
    "dict": (lambda m, h: h * m.__dict__["gain"], lambda m: setattr(m, "gain", 3.0)),
    "attrgetter": (lambda m, h: h * read_gain(m), lambda m: setattr(m, "gain", 3.0)),
    "slots": (lambda m, h: h * m.slots.value, lambda m: setattr(m.slots, "value", 3.0)),
    "type": (lambda m, h: h * 3 if m.flag is True else h, lambda m: setattr(m, "flag", True)),
    "order of a dict": (in_order, reorder),
    "context variable": (lambda _, h: h * variable.get(), lambda _: variable.set(3.0)),
    "thread": (lambda _, h: h * local.value, lambda _: setattr(local, "value", 3.0)),
    "environment": (
        lambda _, h: h * float(os.environ.get("SHOAL_TEST_FACTOR", "1")),
        lambda _: os.environ.update(SHOAL_TEST_FACTOR="3"),
    ),
    "default": (with_default, set_defaults),
    "sign of zero": (lambda m, h: by_sign(m.zero, h), lambda m: setattr(m, "zero", -0.0)),
    "sign of zero in a list": (
        lambda m, h: by_sign(m.zeros[1], h),
        lambda m: m.zeros.__setitem__(1, -0.0),
    ),
    "sign of complex zero": (
        lambda m, h: by_sign(m.complex_zero.imag, h),
        lambda m: setattr(m, "complex_zero", complex(0.0, -0.0)),
    ),
}


@contextmanager
def as_before() -> Iterator[None]:
    """All that the cases above read, at its first value; and again after it."""
    global scale
    for is_after in (False, True):
        scale, local.value = 1.0, 1.0
        Config.value = Shared.value = 1.0
        if "value" in vars(Derived):
            del Derived.value
        variable.set(1.0)
        os.environ.pop("SHOAL_TEST_FACTOR", None)
        with_default.__kwdefaults__ = {"factor": 1.0}
        if not is_after:
            yield


def data() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 8).view(2, 4), torch.ones(2, 4)


def written_out(model: Any, optimizer: Any) -> Tensor:
    x, y = data()
    optimizer.zero_grad()
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def losses(model: Any, change: Callable[[Any], Any], *, compiles: bool) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = compile_step(model, functional.mse_loss, optimizer)
    found = []
    for number in range(6):
        if number == 3:
            change(model)
        found.append(step(*data()) if compiles else written_out(model, optimizer))
    return found


@pytest.mark.parametrize("case", READS)
def test_changes_far_away_are_noticed(case: str) -> None:
    read, change = READS[case]
    with as_before():
        theirs = losses(Net(read), change, compiles=False)
    with as_before():
        ours = losses(Net(read), change, compiles=True)
    torch.testing.assert_close(ours, theirs)


def keep_last(model: Any, h: Tensor) -> Tensor:
    model.last = model.last * 0.5 + h.detach()
    return h + model.last


def keep_in_list(model: Any, h: Tensor) -> Tensor:
    model.rows[0] = h.detach()
    return h


def keep_on_class(model: Any, h: Tensor) -> Tensor:
    Config.last = h.detach()
    return h


UNREPEATABLE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "random": (lambda _, h: h * random.random(), "from random"),
    "own random": (lambda model, h: h * model.own.random(), "from own"),
    "numpy": (lambda _, h: h * float(np.random.rand()), "from numpy.random"),
    "iterator": (lambda _, h: h * next(counter), "counter"),
    "tensor attribute": (keep_last, "last is another tensor"),
    "tensor in a list": (keep_in_list, r"rows\[0\] is another tensor"),
    "class attribute": (keep_on_class, "Config.last"),
}


@pytest.mark.parametrize("case", UNREPEATABLE)
def test_what_a_graph_would_not_repeat_is_refused(case: str) -> None:
    """Before anything has changed: no draw is lost, no fake tensor left."""
    read, words = UNREPEATABLE[case]
    Config.last = torch.zeros(2, 4)
    model = Net(read)
    step = compile_step(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(*data())
    states = random.getstate(), model.own.getstate()
    held = model.last, model.rows[0], Config.last
    weight = model.layer.weight.clone()
    with pytest.raises(NotImplementedError, match=words):
        step(*data())
    assert states == (random.getstate(), model.own.getstate())
    assert all(map(operator.is_, held, (model.last, model.rows[0], Config.last)))
    assert torch.equal(model.layer.weight, weight)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_hooks_of_all_modules_are_noticed(kind: str) -> None:
    def register(_: Any) -> None:
        if kind == "forward":
            handles.append(register_module_forward_hook(double_linear))
        else:
            handles.append(register_module_full_backward_hook(double_gradients))

    def double_linear(module: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        return output * 2 if isinstance(module, nn.Linear) else None

    def double_gradients(_: nn.Module, grads: Any, __: Any) -> Any:
        return tuple(None if grad is None else grad * 2 for grad in grads)

    handles: list[Any] = []
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        try:
            found.append(losses(model, register, compiles=compiles))
        finally:
            handles.pop().remove()
    torch.testing.assert_close(*found)


class Own(torch.optim.Optimizer):
    """An optimizer that reads attributes of its own, and a global."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.factor, self.history = 1.0, list[int]()
        self.remembers = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.remembers:
            self.history.append(1)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad * (-group["lr"] * self.factor * scale))


@pytest.mark.parametrize("what", ["attribute", "global"])
def test_what_an_optimizer_reads_is_noticed(what: str) -> None:
    weights = []
    for compiles in (True, False):
        with as_before():
            model = Net(lambda _, h: h)
            optimizer = Own(model.parameters())
            step = compile_step(model, functional.mse_loss, optimizer)
            for number in range(5):
                if number == 3:
                    set_scale(None) if what == "global" else setattr(optimizer, "factor", 3.0)
                step(*data()) if compiles else written_out(model, optimizer)
            weights.append(model.layer.weight)
    torch.testing.assert_close(*weights)


def test_optimizers_that_remember_are_refused() -> None:
    model = Net(lambda _, h: h)
    optimizer = Own(model.parameters())
    optimizer.remembers = True
    step = compile_step(model, functional.mse_loss, optimizer)
    step(*data())
    with pytest.raises(NotImplementedError, match=r"optimizer\.history"):
        step(*data())
    assert optimizer.history == [1]
    optimizer.remembers = False
    optimizer.state["all"] = {"count": torch.ones(())}
    with pytest.raises(NotImplementedError, match="under 'all'"):
        step(*data())


def test_caches_of_functions_keep_no_fake_tensors() -> None:
    @functools.lru_cache
    def positions(num: int) -> Tensor:
        return torch.arange(float(num))[:, None]

    model = Net(lambda _, h: h * positions(len(h)))
    step = compile_step(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(NotImplementedError):
        step(torch.ones(3, 4), torch.ones(3, 4))
    assert type(positions(3)) is Tensor


def test_a_cache_that_a_step_fills_is_refused_by_name() -> None:
    def read(model: Any, h: Tensor) -> Tensor:
        if len(h) not in model.factors:
            model.factors[len(h)] = torch.arange(float(len(h)))[:, None]
        return h * model.factors[len(h)]

    model = Net(read)
    step = compile_step(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(*data())
    with pytest.raises(NotImplementedError, match="changes Python's state: factors"):
        step(torch.ones(3, 4), torch.ones(3, 4))
    assert 3 not in model.factors


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, output: Tensor, wanted: Tensor) -> Tensor:
        return functional.mse_loss(output * self.weight, wanted)


def test_parameters_of_a_loss_are_frozen_and_thawed() -> None:
    model, loss_fn = Net(lambda _, h: h), Weighted()
    optimizer = torch.optim.SGD([*model.parameters(), *loss_fn.parameters()], lr=0.1)
    step = compile_step(model, loss_fn, optimizer)
    for trains in (True, False, True):
        loss_fn.weight.requires_grad_(trains)
        for _ in range(2):
            before = loss_fn.weight.detach().clone()
            step(*data())
            assert torch.equal(loss_fn.weight, before) is not trains
    loss_fn.weight.register_hook(lambda grad: grad)
    with pytest.raises(NotImplementedError, match="hooks on parameters"):
        step(*data())


def test_scripted_models_are_refused_in_plain_words() -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    step = compile_step(model, functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(NotImplementedError, match="TorchScript"):
        step(*data())


def test_packages_beside_the_environment_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's own packages, and those that a path file names: their globals are not compared."""
    package = tmp_path / "lib" / "python3" / "site-packages" / "elsewhere_installed.py"
    package.parent.mkdir(parents=True)
    package.write_text(
        "calls = 0\n\n\ndef act(x):\n    global calls\n    calls += 1\n    return x\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    act = importlib.import_module("elsewhere_installed").act

    class Model(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return act(super().forward(input))

    model = Model(3, 2)
    step = compile_step(model, lambda y, _: y.sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        step(torch.ones(1, 3), None)
    assert step.num_graphs == 1

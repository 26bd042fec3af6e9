"""A run that computed on something else than its parameters must not have figures."""

import math

import pytest
import torch
from torch import Tensor, nn

from shoal.bench.cases import CASES, Mode, Run
from shoal.bench.model import ValuesError, check_gathers, check_gradients, check_losses
from shoal.bench.workbench import Workbench, build_model

CASE = CASES[0].quickly()
RUN = Run(case=CASE, engine="plain", mode=Mode.EAGER, device_type="cpu")
SHAPE = CASE.shape
GOOD = math.log(SHAPE.vocab_size) + 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, 40.0])
def test_a_loss_that_is_no_such_loss_is_refused(bad: float) -> None:
    check_losses([GOOD, GOOD], SHAPE)
    with pytest.raises(ValuesError, match=rf"the loss was {bad} in step 1 of 3"):
        check_losses([GOOD, bad, GOOD], SHAPE)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_gradients_of_nothing_are_refused(bad: float) -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([bad, 0.0, 0.0])
    with pytest.raises(ValuesError, match="the norm of all gradients was"):
        check_gradients([parameter])


def drawn(std: float = SHAPE.std) -> Tensor:
    return torch.randn(4096, generator=torch.Generator().manual_seed(0)).mul(std).bfloat16()


def test_gathers_are_like_the_parameters() -> None:
    check_gathers([drawn(), drawn()[:4], torch.zeros(3, dtype=torch.int64)], SHAPE)
    check_gathers([], SHAPE)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (drawn().index_fill(0, torch.tensor([77]), math.nan), "gather 1 of 2 delivered"),
        (torch.zeros(4096), "gather 1 of 2 delivered"),
        (drawn(1.0), "standard deviation"),
        # gradients in fp32, read as bf16: the low halves of numbers are anything
        (torch.randn(2048).view(torch.bfloat16), "gather 1 of 2 delivered|standard deviation"),
    ],
)
def test_gathers_of_something_else_are_refused(bad: Tensor, message: str) -> None:
    with pytest.raises(ValuesError, match=message):
        check_gathers([drawn(), bad], SHAPE)


class Spoiled(nn.Module):
    """Loses its numbers in one step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(GOOD))
        self.steps_left = at

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.steps_left -= 1
        return self.weight * (math.nan if self.steps_left == 0 else 1.0)


@pytest.mark.parametrize("at", [1, 2])
def test_every_step_is_looked_at(at: int) -> None:
    for take in (
        lambda workbench: workbench.warm_up(2),
        lambda workbench: workbench.time_compute(2),
        lambda workbench: workbench.time_optimizer(2),
        lambda workbench: workbench.measure_memory(2),
        lambda workbench: workbench.measure_training_memory(2),
    ):
        workbench = Workbench(RUN, Spoiled(at))
        with pytest.raises(ValuesError, match="the loss was nan"):
            take(workbench)


def test_backward_is_looked_at_too() -> None:
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            return grads[0] * math.nan

    class Model(Spoiled):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return Backward.apply(self.weight)  # pyright: ignore[reportReturnType]

    workbench = Workbench(RUN, Model(0))
    workbench.warm_up(1)
    with pytest.raises(ValuesError, match="the norm of all gradients was nan"):
        workbench.inspect(None)


def test_the_model_of_the_benchmark_has_the_values_it_is_checked_for() -> None:
    model = build_model(RUN)
    for parameter in model.parameters():
        std = float(parameter.detach().float().square().mean().sqrt())
        assert std == pytest.approx(SHAPE.std, rel=0.3)
    workbench = Workbench(RUN, model)
    loss = float(workbench.step())
    assert loss == pytest.approx(GOOD, abs=0.25)
    check_gradients(model.parameters())

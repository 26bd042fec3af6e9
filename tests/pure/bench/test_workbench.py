import time

import pytest
import torch
from torch import Tensor, nn

from shoal.bench.cases import CASES, Mode, Run
from shoal.bench.workbench import Workbench, build_model

RUN = Run(case=CASES[0].quickly(), engine="plain", mode=Mode.EAGER, device_type="cpu")
NAP_S = 0.02
LOSS = 6.6
"""A plausible one."""


class Slow(nn.Module):
    """Takes its time in forward, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), LOSS / 3))
        self.num_forwards = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        assert self.weight.grad is None
        assert tokens.shape == targets.shape == (RUN.case.batch_size, RUN.case.seq_len)
        self.num_forwards += 1
        time.sleep(NAP_S)
        return self.weight.sum()


def test_each_step_is_timed_and_leaves_no_gradient() -> None:
    model = Slow()
    workbench = Workbench(RUN, model)
    workbench.warm_up(2)
    timed = workbench.time_compute(3)
    assert model.num_forwards == 5
    assert len(timed.wall_ms) == 3
    assert min(timed.wall_ms) >= NAP_S * 1e3
    assert timed.forward_backward_ms == timed.wall_ms
    assert timed.host_ms == ()
    assert model.weight.grad is None
    assert torch.equal(model.weight, torch.full((3,), LOSS / 3))


def test_optimizer_steps_are_taken_but_not_timed_with_the_model() -> None:
    model = Slow()
    workbench = Workbench(RUN, model)
    timed = workbench.time_optimizer(2)
    assert len(timed.optimizer_ms) == 2
    assert max(timed.optimizer_ms) < NAP_S * 1e3
    assert model.num_forwards == 3  # the first step makes the state, untimed
    assert torch.equal(model.weight, torch.full((3,), LOSS / 3)), "what is gathered stays"
    workbench.time_optimizer(1)
    assert model.num_forwards == 4


def test_memory_is_that_of_untimed_steps() -> None:
    model = Slow()
    workbench = Workbench(RUN, model)
    memory = workbench.measure_memory(2)
    training_memory = workbench.measure_training_memory(2)
    assert model.num_forwards == 5
    assert (memory.resident_gib or 0) > 0
    assert (training_memory.resident_gib or 0) > 0


@pytest.mark.parametrize(("engine", "dtype"), [("plain", torch.bfloat16), ("fsdp2", torch.float32)])
def test_the_model_starts_in_the_dtype_its_engine_needs(engine: str, dtype: torch.dtype) -> None:
    model = build_model(Run(case=RUN.case, engine=engine, mode=Mode.EAGER, device_type="cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}

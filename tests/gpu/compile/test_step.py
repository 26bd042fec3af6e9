"""`compile_step` on CUDA: recorded once, replayed with one launch, the same training."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal import compile_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(32, 8)).cuda()


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_replayed_step_is_that_of_the_program(kind: str) -> None:
    ours, theirs = network(), network()
    make: Any = getattr(torch.optim, kind)
    optimizers = [make(model.parameters(), lr=1e-2) for model in (ours, theirs)]
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 3, 0.5) for one in optimizers]
    step = compile_step(ours, functional.mse_loss, optimizers[0], max_norm=1.0)
    for number in range(8):
        torch.manual_seed(number)
        x, y = torch.randn(16, 32, device="cuda"), torch.randn(16, 8, device="cuda")
        loss = step(x, y)
        wanted = functional.mse_loss(theirs(x), y)
        wanted.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizers[1].step()
        optimizers[1].zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-4, atol=1e-5)
    assert step.why_not_replayed is None
    assert step.num_graphs == 1
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_losses_are_the_callers_own() -> None:
    """A later replay does not write over the loss of an earlier one."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = compile_step(model, functional.mse_loss, optimizer)
    x, y = torch.randn(16, 32, device="cuda"), torch.randn(16, 8, device="cuda")
    losses = [step(x, y) for _ in range(6)]
    assert len({loss.data_ptr() for loss in losses}) == 6
    assert all(a > b for a, b in itertools.pairwise(losses))

"""Replicated modules on NCCL ranks that share one GPU, beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from harness import nccl_ranks
from replicas import Branches, Model, assert_same, batch, pair, train
from shoal import replicate

pytestmark = pytest.mark.filterwarnings("ignore")


@nccl_ranks(2)
@pytest.mark.parametrize("as_views", [False, True])
def test_training(as_views):
    ours, theirs = pair(device="cuda", gradient_as_bucket_view=as_views)
    train(ours, theirs, device="cuda")


@nccl_ranks(2)
@pytest.mark.parametrize(
    "hook", ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "power_sgd"]
)
def test_hooks(hook):
    ours, theirs = pair(device="cuda")
    for model in (ours, theirs):
        if hook == "power_sgd":
            state = powerSGD_hook.PowerSGDState(
                None, start_powerSGD_iter=2, min_compression_rate=0.5
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            model.register_comm_hook(None, getattr(default_hooks, hook))
    train(ours, theirs, device="cuda")


@nccl_ranks(2)
def test_unused_parameters():
    ours, theirs = pair(Branches, device="cuda", find_unused_parameters=True)
    for branch in (0, None, 1):
        for model in (ours, theirs):
            model(batch(0, "cuda"), branch).mean().backward()
        assert_same(ours, theirs)


class TwoStreams(nn.Module):
    """Half of the work on a stream of its own, so that gradients come from both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(512, 512), nn.Linear(512, 512)
        self.stream = torch.cuda.Stream()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            side = self.two(x)
        main = self.one(x)
        current.wait_stream(self.stream)
        return main + side


@nccl_ranks(2)
def test_gradients_of_two_streams():
    torch.manual_seed(0)
    model = replicate(TwoStreams().cuda(), gradient_as_bucket_view=True)
    x = torch.randn(512, 512, device="cuda")
    expected = torch.autograd.grad(model(x).pow(2).sum(), list(model.parameters()))
    for _ in range(5):
        model.zero_grad()
        model(x).pow(2).sum().backward()
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad)


@nccl_ranks(2)
def test_gradients_that_are_not_accumulated():
    """One rank takes some of its own, and slopes are part of the loss."""
    ours, theirs = pair(device="cuda")

    def step(model: nn.Module, x: torch.Tensor) -> None:
        x.requires_grad_()
        loss = model(x).pow(2).mean()
        if dist.get_rank() == 0:
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss, trained, retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).sum()).backward()

    train(ours, theirs, step=step, device="cuda")


@nccl_ranks(2)
def test_names_stay():
    model = replicate(Model().cuda())
    assert list(model.state_dict()) == list(Model().state_dict())

"""Models and comparisons for tests of replicated modules, on any device.

The truth is torch's `DistributedDataParallel` on the same inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal import replicate

Step = Callable[[nn.Module, torch.Tensor], None]


class Model(nn.Module):
    """A shared weight, a frozen one, buffers of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.inner = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.inner.weight
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.tied(self.frozen(self.inner(x))))


class Branches(nn.Module):
    """Goes by one of its branches, or by none."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, branch: int | None) -> torch.Tensor:
        return self.last(x if branch is None else self.branches[branch](x))


def pair(
    make: Callable[[], nn.Module] = Model,
    *,
    device: str = "cpu",
    small: bool = True,
    **options: Any,
) -> tuple[nn.Module, nn.Module]:
    """A replicated module and torch's, from different values on every rank."""
    models = []
    for _ in range(2):
        torch.manual_seed(dist.get_rank())
        models.append(make().to(device))
    ours = {"bucket_cap_mb": 1e-4, "first_bucket_mb": 1e-4} if small else {}
    theirs = {"bucket_cap_mb": 1e-4} if small else {}
    return replicate(models[0], **ours, **options), DistributedDataParallel(
        models[1], **theirs, **options
    )


def batch(step: int, device: str = "cpu") -> torch.Tensor:
    """Another one on every rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 5, generator=generator).to(device)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    """The same names, values, gradients and buffers, to the bit."""
    other = theirs.module if isinstance(theirs, DistributedDataParallel) else theirs
    assert list(ours.state_dict()) == list(other.state_dict())
    for (name, a), (_, b) in zip(ours.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None and b.grad is not None:
            assert torch.equal(a.grad, b.grad), f"{name}.grad: {a.grad} and {b.grad}"
    for (name, a), (_, b) in zip(ours.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(a, b), name


def train(
    ours: nn.Module,
    theirs: nn.Module,
    *,
    num_steps: int = 4,
    step: Step | None = None,
    device: str = "cpu",
    set_to_none: bool = True,
) -> None:
    """Train both, and compare after every backward."""
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for m in (ours, theirs)
    ]
    for number in range(num_steps):
        x = batch(number, device)
        for model in (ours, theirs):
            if step is None:
                model(x).pow(2).mean().backward()
            else:
                step(model, x)
        assert_same(ours, theirs)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

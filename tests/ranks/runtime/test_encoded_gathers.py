"""Gathers in few bits: weights are what the format makes of them, and nothing else changes.

The truth is the unsharded model whose weights pass through the format, with gradients past it.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrize

from harness import ranks
from oracle import full
from shoal.comm import observer
from shoal.errors import RankError, UsageError
from shoal.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    full_parameters,
    fully_shard,
    plan_of,
)
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.low_precision import MXFP8, NVFP4, Float8, GatherFormat
from shoal.runtime.fully_shard import replicate
from shoal.runtime.observe import watch

FORMATS: list[GatherFormat] = [Float8(), MXFP8(), NVFP4()]
LAYOUTS: list[Layout] = [Even(), Rows(), Block(128), Whole()]
BF16 = torch.bfloat16


class Mlp(nn.Module):
    """A block with matrices, vectors, and a filter that travels as it is."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        self.filter = nn.Parameter(torch.randn(5, 3) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.filter.mean()


class Net(nn.Module):
    """An embedding that is tied to the head, and blocks."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, dim)
        self.blocks = nn.ModuleList(Mlp(dim) for _ in range(3))
        self.head = nn.Linear(dim, 19, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(dim: int = 64) -> Net:
    torch.manual_seed(0)
    return Net(dim)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokens_of(step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(19, (4, 6), generator=generator)


class PastTheFormat(torch.autograd.Function):
    """The round trip of a weight; its gradient is that of what arrives."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, form: GatherFormat, dtype: torch.dtype) -> Any:
        ctx.dtype = weight.dtype
        return form.round_trip(weight, dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.to(ctx.dtype), None, None


class RoundTrip(nn.Module):
    """Makes a parametrization of it."""

    def __init__(self, form: GatherFormat, dtype: torch.dtype) -> None:
        super().__init__()
        self.form, self.dtype = form, dtype

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return PastTheFormat.apply(weight, self.form, self.dtype)


class Oracle:
    """The unsharded model on one rank's input after another; gradients are averaged in fp32."""

    def __init__(self, form: GatherFormat, dtype: torch.dtype, prepare: Callable[..., object]):
        self.model = build()
        prepare(self.model)
        self.names = [name for name, _ in self.model.named_parameters()]
        self.weights = list(self.model.parameters())
        self.form, self.dtype = form, dtype

    def gradients(self, inputs: list[torch.Tensor]) -> tuple[list[float], list[Any]]:
        losses, sums = [], [None] * len(self.weights)
        for tokens in inputs:
            arrived = {
                name: PastTheFormat.apply(weight, self.form, self.dtype)
                for name, weight in zip(self.names, self.weights, strict=True)
            }
            arrived["head.weight"] = arrived["embedding.weight"]
            loss = loss_of(lambda x, given=arrived: call(self.model, given, x), tokens)
            trained = [weight for weight in self.weights if weight.requires_grad]
            grads = iter(torch.autograd.grad(loss, trained))
            losses.append(loss.item())
            for index, weight in enumerate(self.weights):
                if weight.requires_grad:
                    grad, before = next(grads), sums[index]
                    sums[index] = grad if before is None else before + grad
        return losses, [None if s is None else s / len(inputs) for s in sums]


def call(model: nn.Module, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(model, weights, (tokens,), tie_weights=False)


def shard(model: Net, policy: MixedPrecisionPolicy, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def nothing(model: nn.Module) -> None:
    """As it is built."""


def freeze(model: Any) -> None:
    model.blocks[1].up.weight.requires_grad_(False)
    model.blocks[2].requires_grad_(False)


def check_training(
    form: GatherFormat,
    dtype: torch.dtype = BF16,
    prepare: Callable[..., object] = nothing,
    configure: Callable[..., object] = nothing,
    micro_batches: int = 1,
    **options: Any,
) -> None:
    """Losses are bitwise those of the oracle, and so are gradients on two ranks."""
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, gather_format=form
    )
    oracle = Oracle(form, dtype, prepare)
    model = build()
    prepare(model)
    model = shard(model, policy, **options)
    configure(model)
    optimizers = [torch.optim.AdamW(ps, lr=1e-2) for ps in (oracle.weights, model.parameters())]
    rank, size = dist.get_rank(), dist.get_world_size()
    exact = size == 2 and micro_batches == 1
    for step in range(3):
        losses: list[float] = []
        totals: list[Any] = [None] * len(oracle.weights)
        for micro in range(micro_batches):
            inputs = [tokens_of(10 * step + micro, part) for part in range(size)]
            losses, grads = oracle.gradients(inputs)
            totals = [g if t is None else t + g for t, g in zip(totals, grads, strict=True)]
            if isinstance(model, FSDPModule) and micro_batches > 1:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            loss = loss_of(model, inputs[rank])
            assert loss.item() == losses[rank]
            loss.backward()
        for name, weight, total, p in zip(
            oracle.names, oracle.weights, totals, model.parameters(), strict=True
        ):
            weight.grad = total
            assert (p.grad is None) == (total is None), name
            if total is not None and exact:
                assert torch.equal(full(p.grad), total), name
            elif total is not None:
                torch.testing.assert_close(full(p.grad), total, rtol=2e-2, atol=1e-4)
                weight.grad = full(p.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, weight, p in zip(oracle.names, oracle.weights, model.parameters(), strict=True):
            assert p.dtype == torch.float32
            torch.testing.assert_close(full(p), weight.detach(), rtol=1e-6, atol=1e-7, msg=name)
            with torch.no_grad():
                weight.copy_(full(p))


@pytest.mark.compose("low-precision gathers", "fully_shard", "Even", "Rows", "Block", "Whole")
@pytest.mark.compose("Adam and AdamW", "fp8")
@pytest.mark.compose("mixed precision", "fp8")
@pytest.mark.compose("tied parameters in one unit", "fp8")
@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("form", FORMATS, ids=repr)
def test_training_is_that_of_the_rounded_weights(form: GatherFormat, layout: Layout) -> None:
    check_training(form, layout=layout)

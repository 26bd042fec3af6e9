"""Gradients reduced in eight bits: sums to a rounding, and what is rounded away comes next time."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from oracle import full
from shoal import compile_step
from shoal.errors import UsageError
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from shoal.low_precision import MXFP8, Int8
from shoal.low_precision.reduction import Int8ReduceScatter
from shoal.runtime.module_state import units_of

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 1))


def shard(form: Int8 | None, **options: Any) -> Any:
    model = build()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, reduce_format=form)
    fully_shard(model[0], mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def inputs_of(step: int, part: int) -> torch.Tensor:
    """The first number is nothing, so that its weights serve as they like."""
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(1000 * step + part))
    x[:, 0] = 0
    return x


def errors_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, 1:].sin().sum(1, keepdim=True)).square().mean()


@pytest.mark.compose("quantised reductions", "fully_shard", "every layout")
@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_gradients_are_the_means_to_a_rounding(layout: Layout) -> None:
    check_means(layout=layout)


@pytest.mark.compose("quantised reductions", "HSDP")
@ranks(4)
def test_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_means(mesh=mesh)


def check_means(**options: Any) -> None:
    """Each rank's gradient is off by at most half a step of its block."""
    model, exact = shard(Int8(block=16), **options), shard(None, **options)
    x = inputs_of(0, dist.get_rank())
    for one in (model, exact):
        errors_of(one, x).backward()
    pairs = list(zip(model.parameters(), exact.parameters(), strict=True))
    assert not all(torch.equal(full(p.grad), full(q.grad)) for p, q in pairs)
    largest = max(full(q.grad).abs().max() for _, q in pairs)  # blocks go across parameters
    for p, q in pairs:
        assert (full(p.grad) - full(q.grad)).abs().max() <= largest * 3 / 127


@pytest.mark.compose("quantised reductions", "fp8")
@ranks(2)
def test_beside_encoded_gathers() -> None:
    policy = MixedPrecisionPolicy(gather_format=MXFP8(), reduce_format=Int8())
    model = fully_shard(nn.Linear(64, 8, bias=False), mp_policy=policy)
    model(torch.ones(1, 64)).sum().backward()
    assert torch.allclose(full(model.weight.grad), torch.ones(8, 64))


@ranks(2)
def test_bytes_and_sums_of_what_was_rounded_away() -> None:
    """Over many steps the sum of reduced gradients is that of the gradients; without, it is not."""
    size, numel, steps = dist.get_world_size(), 4096, 50
    generator = torch.Generator().manual_seed(dist.get_rank())
    grads = 0.005 + 0.01 * torch.randn(steps, size * numel, generator=generator)
    grads[:, ::64] = 10 * (1 - 2 * dist.get_rank())
    sums = grads.sum(0)
    dist.all_reduce(sums)
    mine = sums.view(size, numel)[dist.get_rank()]
    errors = []
    for feeds_back in (True, False):
        scatter = Int8ReduceScatter(Int8(error_feedback=feeds_back))
        total, output = torch.zeros(numel), torch.empty(numel)
        for grad in grads:
            scatter(output, grad, dist.group.WORLD, dist.ReduceOp.SUM)
            total += output
        errors.append(((total - mine).norm() / mine.norm()).item())
        kept = size * numel * (1 + 4 / 128) if feeds_back else 0
        assert scatter.error_bytes == kept
    assert errors[0] < 0.3 * errors[1]
    assert errors[1] > 0.9  # every small gradient was lost


@ranks(2)
@pytest.mark.parametrize("op", ["AVG", "SUM"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operations(op: str, dtype: torch.dtype) -> None:
    scatter = Int8ReduceScatter(Int8(block=8))
    input = torch.arange(-63.0, 63.0).to(dtype) * 2 * (dist.get_rank() + 1)
    output = torch.empty(63, dtype=dtype)
    scatter(output, input, dist.group.WORLD, getattr(dist.ReduceOp, op))
    expected = input.view(2, -1)[dist.get_rank()].float() / (dist.get_rank() + 1) * 3
    expected = expected / 2 if op == "AVG" else expected
    assert (output.float() - expected).abs().max() <= 3.5


@ranks(2)
def test_what_is_not_finite_is_seen_once() -> None:
    scatter = Int8ReduceScatter(Int8(block=8))
    output = torch.empty(16)
    for bad in (torch.inf, torch.nan):
        grad = torch.ones(32)
        grad[3] = bad
        scatter(output, grad, dist.group.WORLD, dist.ReduceOp.SUM)
        if dist.get_rank() == 0:
            assert not output[:8].isfinite().any()
        assert torch.equal(output[8:], torch.full((8,), 2.0))
        scatter(output, torch.ones(32), dist.group.WORLD, dist.ReduceOp.SUM)
        torch.testing.assert_close(output, torch.full((16,), 2.0))


@ranks(2)
def test_what_was_rounded_away_is_dropped_with_the_parameters_it_was_of() -> None:
    model = shard(Int8())
    x = inputs_of(0, dist.get_rank())
    errors_of(model, x).backward()
    scatters = [unit.reduce_scatter for unit in units_of(model)]
    held = [one.error_bytes for one in scatters if isinstance(one, Int8ReduceScatter)]
    assert len(held) == 2
    assert all(held)
    model[2].weight.requires_grad_(False)
    model(x)
    held = [one.error_bytes for one in scatters if isinstance(one, Int8ReduceScatter)]
    assert held.count(0) == 1


@pytest.mark.compose("quantised reductions", "compiled")
@ranks(2)
def test_a_graph_leaves_them_to_the_engine() -> None:
    torch._dynamo.reset()
    models = [shard(Int8()), shard(Int8())]
    runs: list[Any] = [torch.compile(models[0], backend="shoal", fullgraph=True), models[1]]
    for step in range(3):
        for model, run in zip(models, runs, strict=True):
            model.zero_grad()
            errors_of(run, inputs_of(step, dist.get_rank())).backward()
        for p, q in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(full(p.grad), full(q.grad))


@ranks(2)
def test_mistakes() -> None:
    for wrong in (0, -8, 1.5):
        with pytest.raises(UsageError, match="Int8 takes the number of elements"):
            Int8(wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"must be Int8\(\)"):
        MixedPrecisionPolicy(reduce_format=torch.int8)  # pyright: ignore[reportArgumentType]
    model = shard(Int8())
    step = compile_step(model, lambda y, _: y.sum(), torch.optim.SGD(model.parameters(), lr=0.1))
    step(torch.ones(2, 12), None)  # the first one is not captured
    with pytest.raises(NotImplementedError, match=r"reduce_format=Int8.* in compile_step"):
        step(torch.ones(2, 12), None)


def losses_of(form: Int8 | None, num_steps: int) -> list[float]:
    """Beside what is learnt, some gradients are large, and of another sign on each rank."""
    model, sign = shard(form), 1 - 2 * dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-2)
    losses = []

    def large(layer: nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        columns = layer.weight[:, :: 12 if layer.in_features == 12 else 8]
        return Tugged.apply(output, columns.sum(), 100.0 * sign)

    for layer in (model[0], model[2]):
        layer.register_forward_hook(large)
    for step in range(num_steps):
        loss = errors_of(model, inputs_of(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


class Tugged(torch.autograd.Function):
    """An output as it is; something beside it gets a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, beside: torch.Tensor, grad: float) -> Any:
        ctx.grad = grad
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, torch.tensor(ctx.grad), None


@ranks(2, timeout_s=120)
def test_200_steps_converge_as_in_fp32_and_without_feedback_they_do_not() -> None:
    exact, fed, lost = (
        sum(losses_of(form, 200)[-50:]) / 50 for form in (None, Int8(), Int8(error_feedback=False))
    )
    assert abs(fed - exact) < 0.01 * exact
    assert lost - exact > max(5 * abs(fed - exact), 0.02 * exact)

"""Weights that quantise themselves for gathers, as torchao's do, in units of every layout."""

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from harness import ranks
from oracle import full
from shoal.fsdp import MixedPrecisionPolicy, fully_shard
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole
from wrapped import Wrapped

LAYOUTS: list[Layout] = [Even(), Flat(), Rows(), Block(5), Whole()]
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
_aten = torch.ops.aten


class Arrived(Wrapped):
    """A full weight: codes and one scale, which operations see as numbers."""

    shown_as = BF16
    scale: torch.Tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (_aten.detach.default, _aten.as_strided.default):
            found = cls(func(args[0].whole, *args[1:]))
            found.scale = args[0].scale
            return found
        args, kwargs = tree_map_only(Arrived, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)

    def values(self) -> torch.Tensor:
        return (self.whole.to(BF16) * self.scale).to(BF16)


def scale_of(largest: torch.Tensor) -> torch.Tensor:
    return largest.clamp(min=1e-12) / 448


class Float8Weight(Wrapped):
    """One scale for the whole weight, of the largest of all ranks' shards."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        largest = self.whole.abs().amax() if self.whole.numel() else torch.zeros(())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = scale_of(largest)
        return ((self.whole / scale).to(E4M3),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        (codes,), (scale,) = outputs, metadata
        if out is None:
            found = Arrived(codes)
            found.scale = scale
            return found, (codes,)
        out.scale.copy_(scale)
        return None


def build(kind: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind(layer.weight.detach()))
    return model


def rounded(weight: torch.Tensor) -> torch.Tensor:
    scale = scale_of(weight.abs().amax())
    return ((weight / scale).to(E4M3).to(BF16) * scale).to(BF16)


def unsharded_loss(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Weights pass through the scale of the whole of them; biases are cast."""
    used = [(rounded(p) if p.dim() > 1 else p.to(BF16)) for p in model.parameters()]
    used = [one.detach().requires_grad_() for one in used]
    hidden = torch.tanh(nn.functional.linear(x.to(BF16), used[0], used[1]))
    return nn.functional.linear(hidden, used[2], used[3]).float().square().mean(), used


@pytest.mark.compose("tensors with gather hooks", "fully_shard", "every layout", "fp8")
@ranks(2, 4)
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_float8_weights_train_in_every_layout(layout: Layout) -> None:
    check_float8_weights(layout=layout)


@pytest.mark.compose("tensors with gather hooks", "HSDP")
@ranks(4)
@pytest.mark.parametrize("layout", [Even(), Rows()], ids=repr)
def test_float8_weights_on_replicas(layout: Layout) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    check_float8_weights(layout=layout, mesh=mesh)


def check_float8_weights(layout: Layout, **options: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
    plain, model = build(lambda weight: weight), build(Float8Weight)
    for layer in (model[0], model[2]):
        fully_shard(layer, layout=layout, mp_policy=policy, **options)
    fully_shard(model, layout=layout, mp_policy=policy, **options)
    assert all(isinstance(layer.weight, DTensor) for layer in (model[0], model[2]))
    assert isinstance(model[0].bias, DTensor) == isinstance(layout, Even)
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(size, 8, 6, generator=generator)
        loss = model(x[rank]).float().square().mean()
        loss.backward()
        sums = [torch.zeros_like(p) for p in plain.parameters()]
        for part in range(size):
            expected, used = unsharded_loss(plain, x[part])
            if part == rank:
                assert torch.equal(loss, expected)
            for total, grad in zip(sums, torch.autograd.grad(expected, used), strict=True):
                total += grad.float() / size
        with torch.no_grad():
            for p, q, total in zip(plain.parameters(), model.parameters(), sums, strict=True):
                torch.testing.assert_close(whole(q.grad), total, rtol=1e-5, atol=1e-7)
                local(q).sub_(local(q.grad), alpha=0.1)
                q.grad = None
                p.copy_(whole(q))
        model.reshard()  # shards were written past every version


def local(tensor: Any) -> torch.Tensor:
    found = tensor.to_local() if isinstance(tensor, DTensor) else tensor.local
    return found.whole if isinstance(found, Wrapped) else found


def whole(tensor: Any) -> torch.Tensor:
    found = full(tensor)
    return found.whole if isinstance(found, Wrapped) else found


@ranks(2)
@pytest.mark.parametrize("layout", [Even(), Rows()], ids=repr)
def test_torchao_float8_weights(layout: Layout) -> None:
    """The library itself, where it is installed: gathers move float8, and training goes on."""
    try:
        float8: Any = importlib.import_module("torchao.float8")
    except Exception as error:
        pytest.skip(f"torchao does not import here: {error}")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    float8.convert_to_float8_training(model, config=config)
    for layer in (model[0], model[2]):
        fully_shard(layer, layout=layout)
    fully_shard(model, layout=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for _ in range(5):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]

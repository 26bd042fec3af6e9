"""Clipping by the norm of all ranks' gradients, beside the unsharded model and torch's wrapper."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from harness import ranks
from shoal.fsdp import FullyShardedDataParallel, ShardingStrategy

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
NORMS = (1, 2.0, 3, 0.5, math.inf, -1.0, -math.inf)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3)
        self.third = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.third(self.second(torch.relu(self.first(x)))))


def inputs() -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(3))


def plain_norm(max_norm: float, norm_type: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = Model()
    model(inputs()).pow(2).sum().mul(50).backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return total, [p.grad for p in model.parameters() if p.grad is not None]


def squares(model: nn.Module) -> torch.Tensor:
    """The squares of all ranks' gradients, by wrapped module, added up once for each element."""
    totals = []
    for one in FullyShardedDataParallel.fsdp_modules(model):
        own = torch.zeros(())
        assert one._unit is not None
        for parameter in one._unit.sharded_parameters():
            if parameter.grad is not None:
                own += parameter.grad.float().pow(2).sum()
        if one.sharding_strategy is not ShardingStrategy.NO_SHARD:
            dist.all_reduce(own, group=one.process_group)
        totals.append(own)
    return torch.stack(totals).sum()


def wrapped(strategies: dict[str, Any], outer: Any, **options: Any) -> FullyShardedDataParallel:
    model = Model()
    for name, strategy in strategies.items():
        inner = FullyShardedDataParallel(
            getattr(model, name), sharding_strategy=strategy, device_id=CPU, **options
        )
        setattr(model, name, inner)
    return FullyShardedDataParallel(model, sharding_strategy=outer, device_id=CPU, **options)


MIXES = [
    ({"second": ShardingStrategy.FULL_SHARD}, ShardingStrategy.FULL_SHARD),
    ({"second": ShardingStrategy.NO_SHARD}, ShardingStrategy.NO_SHARD),
    (
        {"second": ShardingStrategy.NO_SHARD, "first": ShardingStrategy.SHARD_GRAD_OP},
        ShardingStrategy.FULL_SHARD,
    ),
]


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_norms_are_those_of_the_unsharded_model(use_orig_params: bool) -> None:
    for strategies, outer in MIXES:
        for norm_type in NORMS:
            model = wrapped(strategies, outer, use_orig_params=use_orig_params)
            model(inputs()).pow(2).sum().mul(50).backward()
            total = model.clip_grad_norm_(1.5, norm_type)
            expected, grads = plain_norm(1.5, norm_type)
            torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)
            clipped = torch.stack([grad.pow(2).sum() for grad in grads]).sum()
            torch.testing.assert_close(squares(model), clipped, rtol=1e-4, atol=1e-6)


@ranks(4)
def test_groups_of_different_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model()
    model.second = FullyShardedDataParallel(  # pyright: ignore[reportAttributeAccessIssue]
        model.second,
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=CPU,
    )
    model = FullyShardedDataParallel(model, device_id=CPU)
    model(inputs()).pow(2).sum().mul(50).backward()
    total = model.clip_grad_norm_(1.5)
    expected, _ = plain_norm(1.5, 2.0)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)


@ranks(2)
def test_ignored_parameters_count_and_small_gradients_stay() -> None:
    model = Model()
    root = FullyShardedDataParallel(model, ignored_modules=[model.last], device_id=CPU)
    root(inputs()).pow(2).sum().mul(50).backward()
    before = squares(root)
    expected, _ = plain_norm(1e9, 2.0)
    torch.testing.assert_close(root.clip_grad_norm_(1e9), expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(before, squares(root))
    assert model.last.weight.grad is not None
    whole = model.last.weight.grad.clone()
    root.clip_grad_norm_(float(expected) / 2)
    torch.testing.assert_close(model.last.weight.grad, whole / 2, rtol=1e-3, atol=1e-6)


@ranks(2)
def test_refusals_and_no_gradients() -> None:
    root = wrapped({"second": None}, None)
    with pytest.warns(UserWarning, match="with no gradients"):
        assert root.clip_grad_norm_(1.0) == 0.0
    inner = FullyShardedDataParallel.fsdp_modules(root)[1]
    with pytest.raises(RuntimeError, match="should only be called on the root FSDP instance"):
        inner.clip_grad_norm_(1.0)
    root(inputs()).sum().backward()
    with pytest.raises(ValueError, match="no norm"):
        root.clip_grad_norm_(1.0, 0)


@ranks(2)
def test_the_norm_has_the_widest_dtype_of_the_gradients() -> None:
    half = FullyShardedDataParallel(Model().bfloat16(), device_id=CPU)
    half(inputs().bfloat16()).sum().backward()
    assert half.clip_grad_norm_(1.0).dtype is torch.bfloat16


@ranks(2, 4)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("norm_type", NORMS)
def test_parameters_smaller_than_the_world(norm_type: float, use_orig_params: bool) -> None:
    """A rank without elements of a gradient contributes nothing, whatever the norm."""
    plain = nn.Linear(1, 1)
    wrapper = FullyShardedDataParallel(
        copy.deepcopy(plain), device_id=CPU, use_orig_params=use_orig_params
    )
    for model in (plain, wrapper):
        model(torch.full((2, 1), 3.0)).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    assert torch.allclose(wrapper.clip_grad_norm_(0.5, norm_type), expected)
    with FullyShardedDataParallel.summon_full_params(wrapper, with_grads=use_orig_params):
        for ours, whole in zip(wrapper.parameters(), plain.parameters(), strict=True):
            assert not use_orig_params or torch.allclose(ours.grad, whole.grad)


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_double_precision(norm_type: float, use_orig_params: bool) -> None:
    plain = Model().double()
    wrapper = FullyShardedDataParallel(
        copy.deepcopy(plain), device_id=CPU, use_orig_params=use_orig_params
    )
    for model in (plain, wrapper):
        model(inputs().double()).sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    norm = wrapper.clip_grad_norm_(0.5, norm_type)
    assert norm.dtype is torch.float64
    torch.testing.assert_close(norm, expected, rtol=1e-14, atol=0)

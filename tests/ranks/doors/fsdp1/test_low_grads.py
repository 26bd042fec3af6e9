"""`keep_low_precision_grads`, beside torch's: gradients that are narrower than parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper

from harness import ranks
from shoal.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
STRATEGIES = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)


def run(wrapper: Any, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    inner = wrapper(nn.Linear(5, 7), device_id=CPU, **options)
    model = wrapper(nn.Sequential(inner, nn.ReLU(), nn.Linear(7, 3)), device_id=CPU, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    seen: list[Any] = []
    for step in range(4):
        loss = model(torch.randn(4, 5)).float().pow(2).mean()
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen += [loss.item(), sorted({str(grad.dtype) for grad in grads}), squares(grads)]
        if step % 2:  # the other gradients are added to
            seen.append(model.clip_grad_norm_(0.5).dtype)
            optimizer.step()
            optimizer.zero_grad()
    return seen


def squares(tensors: list[torch.Tensor]) -> float:
    found = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        found += tensor.double().pow(2).sum()
    dist.all_reduce(found)
    return found.item()


@ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_gradients_stay_narrow(
    strategy: ShardingStrategy, use_orig_params: bool, reduce_dtype: torch.dtype | None
) -> None:
    precision = MixedPrecision(torch.bfloat16, reduce_dtype, keep_low_precision_grads=True)
    options = {
        "sharding_strategy": strategy,
        "use_orig_params": use_orig_params,
        "mixed_precision": precision,
    }
    expected = run(TorchWrapper, **options)
    narrow = reduce_dtype is None or strategy is not ShardingStrategy.NO_SHARD
    assert expected[1] == ["torch.bfloat16" if narrow else "torch.float32"]
    for found, wanted in zip(run(FullyShardedDataParallel, **options), expected, strict=True):
        if isinstance(wanted, float):
            assert found == pytest.approx(wanted, rel=2e-2)
        else:
            assert found == wanted


@ranks(2)
def test_gradients_that_are_cast_are_waited_for() -> None:
    """What is on its way to the host may be handed on unread, but not cast, added or shown."""
    unit = FullyShardedDataParallel(nn.Linear(5, 7), device_id=CPU)._unit
    assert unit is not None
    assert not unit.gradients.are_read_at_once([0], torch.float32)
    assert unit.gradients.are_read_at_once([0], torch.bfloat16)
    (parameter,) = unit.sharded_parameters()
    parameter.grad = torch.zeros_like(parameter)
    assert unit.gradients.are_read_at_once([0], torch.float32)
    parameter.grad = None
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert unit.gradients.are_read_at_once([0], torch.float32)

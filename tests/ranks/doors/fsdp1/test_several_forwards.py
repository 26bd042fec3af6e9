"""Several forwards before a backward: the gradients of the unsharded model, bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import ranks
from shoal.fsdp import FullyShardedDataParallel, ShardingStrategy

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")
FSDP = FullyShardedDataParallel


class Tied(nn.Module):
    """A weight that each forward uses twice, so that the order of four additions shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.block = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(x)))


def whole_grads(model: FSDP) -> list[torch.Tensor]:
    """What a step of one changes zeros by."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with FSDP.summon_full_params(model, writeback=False):
        return [-parameter.detach().clone() for parameter in model.parameters()]


@ranks(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("num_forwards", [1, 2, 3])
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=str
)
def test_gradients_are_those_of_the_unsharded_model(
    strategy: ShardingStrategy, num_forwards: int, use_orig_params: bool
) -> None:
    plain = Tied()
    model = copy.deepcopy(plain)
    options = {
        "device_id": CPU,
        "sharding_strategy": strategy,
        "use_orig_params": use_orig_params,
    }
    model.block = FSDP(model.block, **options)
    model = FSDP(model, **options)
    torch.manual_seed(dist.get_rank())
    batches = [torch.randn(5, 8) for _ in range(num_forwards)]
    for one in (plain, model):
        sum(one(batch).square().sum() for batch in batches).backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    for ours, parameter in zip(whole_grads(model), plain.parameters(), strict=True):
        assert torch.equal(ours, parameter.grad)


@ranks(2)
def test_frozen_and_evaluated_between_forwards() -> None:
    """Views are of what is trained now: a forward without gradients leaves none of its own."""
    model = FSDP(Tied(), device_id=CPU)
    batch = torch.ones(2, 8)
    model(batch).sum().backward()
    (first,) = model.parameters()
    expected = first.grad.clone()
    first.grad = None
    with torch.no_grad():
        model(batch)
    loss = model(batch).sum()
    with torch.inference_mode():
        model(batch)
    loss.backward()
    assert torch.equal(first.grad, expected)
    first.grad = None
    first.requires_grad_(False)
    assert not model(batch).requires_grad
    first.requires_grad_(True)
    model(batch).sum().backward()
    assert torch.equal(first.grad, expected)

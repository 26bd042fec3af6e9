"""A forward that asks autograd for gradients goes on with full parameters: both doors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import ranks
from shoal import fully_shard
from shoal.fsdp import FullyShardedDataParallel, ShardingStrategy
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole

pytestmark = pytest.mark.filterwarnings("ignore")

CPU = torch.device("cpu")


class Guided(nn.Module):
    """Scales its inputs by the gradient of a first pass, as guidance and saliency do."""

    def __init__(self, *, accumulates: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = (
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(3)
        )
        self.accumulates = accumulates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        score = self.head(self.second(self.first(x))).square().sum()
        if self.accumulates:
            score.backward()
            guide = x.grad
        else:
            (guide,) = torch.autograd.grad(score, x)
        assert guide is not None
        return self.head(self.second(self.first(x.detach() * guide)))


def by_layout(layout: Layout) -> Callable[[Guided], nn.Module]:
    def shard(model: Guided) -> nn.Module:
        for module in (model.first, model.second, model):
            fully_shard(module, layout=layout)
        return model

    return shard


def by_wrapper(
    strategy: ShardingStrategy, *, use_orig_params: bool
) -> Callable[[Guided], nn.Module]:
    def shard(model: Guided) -> nn.Module:
        def wrap(module: nn.Module) -> nn.Module:
            return FullyShardedDataParallel(
                module,
                device_id=CPU,
                sharding_strategy=strategy,
                use_orig_params=use_orig_params,
            )

        model.first, model.second = wrap(model.first), wrap(model.second)
        return wrap(model)

    return shard


DOORS = {
    **{str(layout): by_layout(layout) for layout in (Even(), Flat(), Rows(), Block(4), Whole())},
    **{
        f"{strategy.name} {kind}": by_wrapper(strategy, use_orig_params=kind == "original")
        for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
        for kind in ("flat", "original")
    },
}


@ranks(2, 4)
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_a_backward_inside_of_a_forward(door: str, accumulates: bool) -> None:
    plain = Guided(accumulates=accumulates)
    model = DOORS[door](copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    torch.manual_seed(1)
    for _ in range(2):
        batch = torch.randn(3, 4)
        outputs = []
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            outputs.append(one(batch))
            outputs[-1].square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(outputs[1], outputs[0])
    dist.barrier()

"""What is tried in every way: a model with something in it, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from compositions.net import DIM, Block, Net

if TYPE_CHECKING:
    from compositions.ways import Way

NUM_STEPS = 3
ROWS = 8
"""Of a batch, over all ranks."""


class Feature:
    """The plain one: steps of SGD with momentum, whose weights show a gradient's size."""

    block: Callable[[], nn.Module] = Block
    num_micro_batches = 1
    tolerance: dict[str, float] = {}
    """How near weights must be; by default as near as fp32 is."""
    num_shards = 2
    """How many ranks share a unit."""
    starts_on_meta = False
    cuts_layers = False
    """Whether layers of blocks are cut by tensor parallelism, in every way."""
    has_experts = False
    needs_units = False
    """Whether replicas must be made by the door that has `fully_shard`'s options."""

    def change(self, net: Net) -> None:
        """Change a new net, before it is sharded."""

    def change_sharded(self, net: Net) -> None:
        """Change it further, where it is going to be sharded."""

    def options(self, way: Way) -> dict[str, Any]:
        """Arguments of the way's door."""
        return {}

    def set_up(self, way: Way) -> None:
        """Call setters of the sharded model."""

    def net(self, *, has_experts: bool) -> Net:
        """The same weights on every call."""
        torch.manual_seed(0)
        net = Net(self.block, has_experts=has_experts)
        self.change(net)
        return net

    def optimizer(self, way: Way, parameters: Iterable[nn.Parameter]) -> Any:
        """An optimizer of all parameters."""
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def batch(self, step: int) -> Tensor:
        """The rows of all ranks, and of all micro-batches."""
        generator = torch.Generator().manual_seed(step)
        return torch.randn(ROWS, DIM, generator=generator)

    def around(self, way: Way) -> AbstractContextManager[Any]:
        """Around forwards, and where a pipeline cannot tell them apart, backwards too."""
        return nullcontext()

    def loss(self, way: Way, model: Any, x: Tensor) -> Tensor:
        """The loss of a forward."""
        return self.loss_of(way, model(x))

    def loss_of(self, way: Way, output: Tensor) -> Tensor:
        """The loss of an output: a mean over rows."""
        return (output.float() - 1).square().mean()

    def world_of(self, column: str) -> int:
        """How many ranks a column needs."""
        has_second_axis = column in ("HSDP", "TP", "EP", "PP")
        return self.num_shards * (2 if has_second_axis else 1)

    def step(self, way: Way, number: int) -> None:
        """One step."""
        way.backward(number)
        way.optimizer.step()
        way.optimizer.zero_grad()

    def moves(self, name: str) -> bool:
        """Whether training changes a parameter."""
        return True

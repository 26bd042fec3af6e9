"""DiLoCo written down on plain modules in one process: the truth for distant replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from oracle import Model, build, full, loss_of
from shoal.distant import DistantReplicas


def mesh_of(num_replicas: int) -> DeviceMesh:
    shape = (num_replicas, dist.get_world_size() // num_replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def batch_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(11, (4, 5), generator=generator)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.125, momentum=0.5)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@dataclass
class Outer:
    """An outer step of plain replicas: torch's own SGD on the anchor's parameters."""

    every: int
    lr: float = 0.7
    momentum: float = 0.9
    delay: int = 0
    share: float = 0.0
    streamed: bool = False


def reference(
    num_steps: int,
    outer: Outer,
    *,
    num_replicas: int = 2,
    num_shards: int = 2,
    make: Callable[[], nn.Module] = build,
    parts_of: Callable[[nn.Module], list[list[nn.Parameter]]] | None = None,
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> list[nn.Module]:
    """Train replicas by DiLoCo, with nothing sharded; gradients are added as ranks add them."""
    anchor = make()
    replicas = [copy.deepcopy(anchor) for _ in range(num_replicas)]
    optimizers = [optimizer_of(one.parameters()) for one in replicas]
    parts = parts_of or (lambda model: [list(model.parameters())])
    anchors = parts(anchor)
    outer_steps = [
        torch.optim.SGD(part, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
        for part in anchors
    ]
    for step in range(1, num_steps + 1):
        for number, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            grads: list[list[torch.Tensor]] = []
            for rank in range(num_shards):
                replica.zero_grad()
                loss_of(replica, batch_of(step, number * num_shards + rank)).backward()
                grads.append([p.grad for p in replica.parameters() if p.grad is not None])
            for parameter, *found in zip(replica.parameters(), *grads, strict=True):
                parameter.grad = sum(found[1:], found[0]) / num_shards
            optimizer.step()
        with torch.no_grad():
            for index, part in enumerate(anchors):
                offset = index * outer.every // len(anchors) if outer.streamed else 0
                own = [parts(replica)[index] for replica in replicas]
                launched = step - outer.delay
                if outer.delay and launched > 0 and (launched - offset) % outer.every == 0:
                    _apply(part, own, outer.share)
                if (step - offset) % outer.every == 0:
                    for one, *values in zip(part, *own, strict=True):
                        learned = [one - value for value in values]
                        one.grad = sum(learned[1:], learned[0]) / num_replicas
                    outer_steps[index].step()
                    if not outer.delay:
                        _apply(part, own, outer.share)
    return replicas


def _apply(anchor: list[nn.Parameter], own: list[list[nn.Parameter]], share: float) -> None:
    for parameters in own:
        for target, source in zip(parameters, anchor, strict=True):
            target.copy_(source if share == 0 else target.lerp(source, 1 - share))


def units_of_model(model: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each unit of `oracle.shard`, in the engine's order: root, then blocks."""
    assert isinstance(model, Model)
    blocks = [list(block.parameters()) for block in model.blocks]
    return [[model.embedding.weight], *blocks]


def train(
    model: nn.Module,
    outer: DistantReplicas,
    steps: range,
    optimizer: torch.optim.Optimizer,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch_of(step, dist.get_rank())).backward()
        optimizer.step()
        outer.step()


def check_equal(model: nn.Module, expected: nn.Module) -> None:
    """To the bit."""
    for (name, p), (_, q) in zip(
        expected.named_parameters(), model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            full(q.detach()), p.detach(), rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def outer_of(model: nn.Module, outer: Outer) -> DistantReplicas:
    return DistantReplicas(model, **asdict(outer))

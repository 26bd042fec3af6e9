"""Gradients of gradients through sharded modules: penalties, forces, Hessians; both doors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from harness import ranks
from oracle import full
from shoal.fsdp import FullyShardedDataParallel, ShardingStrategy
from shoal.fsdp.wrap import ModuleWrapPolicy
from shoal.layout import Block as Blocks
from shoal.layout import Even, Flat, Rows, Whole
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.module_state import units_of
from shoal.runtime.observe import watch
from shoal.runtime.policy import CPUOffloadPolicy, MixedPrecisionPolicy
from shoal.step.phase import Phase

pytestmark = pytest.mark.filterwarnings("ignore:Using backward")
DIM = 6


class Block(nn.Module):
    """Its first parameter is one that gradients of gradients never come to."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(DIM))
        self.up, self.down = nn.Linear(DIM, 7), nn.Linear(7, DIM)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) + self.shift


class Critic(nn.Module):
    """Blocks between two layers that belong to the root."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(3))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Forces(Critic):
    """Its outputs are an energy, and the gradient of that towards the inputs."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x).sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        return forces


def make(kind: type[Critic] = Critic, *, recomputes: bool = False) -> Any:
    torch.manual_seed(0)
    return kind(recomputes)


def shard(model: Critic, **options: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def wrap(model: Critic, **options: Any) -> Any:
    policy = ModuleWrapPolicy({Block})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, **options)


DOORS: dict[str, Callable[[Critic], Any]] = {
    **{
        type(one).__name__: lambda m, one=one: shard(m, layout=one)
        for one in (Even(), Flat(), Rows(), Blocks(5), Whole())
    },
    "kept": lambda m: shard(m, reshard_after_forward=False),
    "offloaded": lambda m: shard(m, offload_policy=CPUOffloadPolicy()),
    "flat wrapper": wrap,
    "wrapper": lambda m: wrap(m, use_orig_params=True),
    "wrapper that keeps": lambda m: wrap(
        m, use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP
    ),
}


def batch(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2 * dist.get_world_size(), DIM, generator=generator)


def own_part(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def slopes(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope


def penalty(model: Any, x: Tensor) -> Tensor:
    """As a critic is kept smooth: each sample's slope has norm one."""
    return (slopes(model, x).norm(dim=-1) - 1).square().mean()


def penalised(model: Any, part: Callable[[Tensor], Tensor]) -> None:
    """Forwards before and after the one that is penalised."""
    loss = model(part(batch(1))).mean()
    loss = loss + penalty(model, part(batch(2)))
    (loss - model(part(batch(3))).square().mean()).backward()


def penalty_alone(model: Any, part: Callable[[Tensor], Tensor]) -> None:
    penalty(model, part(batch())).backward()


def by_backward(model: Any, part: Callable[[Tensor], Tensor]) -> None:
    """The first gradients reach the parameters, too."""
    x = part(batch()).requires_grad_()
    model(x).mean().backward(create_graph=True)
    assert x.grad is not None
    grad, x.grad = x.grad, None
    (grad * len(x)).square().sum(-1).mean().backward()


def third(model: Any, part: Callable[[Tensor], Tensor]) -> None:
    x = part(batch()).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
    curve.square().sum(-1).mean().backward()


def hessian(model: Any, part: Callable[[Tensor], Tensor]) -> None:
    """Row by row, over one graph."""
    x = part(batch()).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    rows = [
        torch.autograd.grad(slope[:, i].sum(), x, retain_graph=True, create_graph=True)[0]
        for i in range(DIM)
    ]
    torch.stack(rows).square().sum((0, 2)).mean().backward()


STEPS = [penalised, penalty_alone, by_backward, third, hessian]


def check_equal(model: Any, plain: nn.Module) -> None:
    """Compare by one step of plain descent, whatever optimizers hold."""
    for one in (model, plain):
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            check_values(model, plain)
    else:
        check_values(model, plain)
        assert not any(u.phase is not Phase.SHARDED for u in units_of(model))


def check_values(model: nn.Module, plain: nn.Module) -> None:
    found = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        value = full(found[name].detach())
        torch.testing.assert_close(value, parameter.detach(), msg=lambda m, n=name: f"{n}: {m}")


@ranks(2, 4)
@pytest.mark.sampled
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_gradients_of_gradients(
    door: str, recomputes: bool, step: Callable[[Any, Callable[[Tensor], Tensor]], None]
) -> None:
    model, plain = DOORS[door](make(recomputes=recomputes)), make(recomputes=recomputes)
    for _ in range(2):
        step(model, own_part)
        step(plain, lambda x: x.clone())
        check_equal(model, plain)
        for one in (model, plain):
            one.zero_grad()


@ranks(2, 4)
@pytest.mark.parametrize("door", DOORS)
def test_forces_inside_of_a_forward(door: str) -> None:
    model, plain = DOORS[door](make(Forces)), make(Forces)
    for _ in range(2):
        model(own_part(batch())).square().mean().backward()
        plain(batch()).square().mean().backward()
        check_equal(model, plain)
        for one in (model, plain):
            one.zero_grad()


@ranks(2)
def test_only_the_first_layers_are_linear() -> None:
    """A gradient of a gradient that comes to one weight, and through no module at all."""
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 1)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    for module in model:
        fully_shard(module)
    fully_shard(model)
    for one, x in ((model, own_part(batch())), (plain, batch())):
        inner = one[0](x).detach().requires_grad_()
        one(x)
        (slope,) = torch.autograd.grad(one[1](inner).sum(), inner, create_graph=True)
        slope.square().sum(-1).mean().backward()
    check_equal(model, plain)


@ranks(2)
def test_accumulation_without_sync() -> None:
    model, plain = shard(make()), make()
    model.set_requires_gradient_sync(False)
    penalised(model, own_part)
    model.set_requires_gradient_sync(True)
    penalty_alone(model, own_part)
    for step in (penalised, penalty_alone):
        step(plain, lambda x: x.clone())
    check_equal(model, plain)


@ranks(4)
def test_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, plain = shard(make(), mesh=mesh), make()
    penalised(model, own_part)
    penalised(plain, lambda x: x.clone())
    check_equal(model, plain)


@ranks(2)
def test_bf16_is_that_of_one_unit() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, one = shard(make(), mp_policy=policy), fully_shard(make(), mp_policy=policy)
    for each in (model, one):
        penalised(each, own_part)
    for (name, p), (_, q) in zip(model.named_parameters(), one.named_parameters(), strict=True):
        assert torch.equal(full(p.grad), full(q.grad)), name


@ranks(2)
def test_units_are_full_until_the_outer_backward_ends_and_gathered_once_more() -> None:
    model = shard(make())
    penalty_alone(model, own_part)
    with watch(model) as recorder:
        loss = penalty(model, own_part(batch()))
        assert all(unit.phase is Phase.HELD for unit in units_of(model))
        with torch.no_grad():
            model(own_part(batch()))
        assert all(unit.phase is Phase.HELD for unit in units_of(model))
        loss.backward()
    assert all(unit.phase is Phase.SHARDED for unit in units_of(model))
    done = [(str(one.kind), one.unit) for one in recorder.actions()]
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        assert done.count(("gather", name)) == 2  # forward, and the backward that made the graph
        assert done.count(("reduce", name)) == 1


@ranks(2)
def test_a_graph_that_nobody_differentiates() -> None:
    """An optimizer's step makes the full parameters old; the next forward gathers new ones."""
    model, plain = shard(make()), make()
    slopes(model, own_part(batch()))
    model.reshard()
    penalised(model, own_part)
    penalised(plain, lambda x: x.clone())
    check_equal(model, plain)

"""What users do around a step: each is right, or refused by name, on every rank."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from harness import ranks
from oracle import Model, batches, build, full, loss_of, shard
from shoal.errors import InvariantError, UsageError
from shoal.runtime.fully_shard import fully_shard
from shoal.runtime.observe import watch


def check_equal(plain: nn.Module, sharded: nn.Module) -> None:
    for (name, p), (_, q) in zip(plain.named_parameters(), sharded.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(full(q.grad), p.grad, msg=lambda m, n=name: f"{n}: {m}")


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same module twice, the second one sharded: blocks first, if it has any."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(make())
    for block in getattr(modules[1], "blocks", ()):
        fully_shard(block)
    return modules[0], fully_shard(modules[1])


def inputs() -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Stack(nn.Module):
    """Two blocks of one kind and a head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@ranks(2)
@pytest.mark.parametrize("of_child", [False, True])
def test_load_state_dict_while_the_root_is_held(of_child: bool) -> None:
    model = shard(build())
    ((whole, _),) = batches(1, dist.get_rank(), 2)
    loss_of(model, whole)
    assert not isinstance(model.embedding.weight, DTensor)
    wanted = torch.full((11, 7), 0.5)
    like = next(iter(model.blocks[0].parameters()))
    state = {"weight": distribute_tensor(wanted, like.device_mesh, like.placements)}
    if of_child:
        model.embedding.load_state_dict(state)
    else:
        state = {"embedding.weight": state["weight"]}
        model.load_state_dict(state, strict=False)
    assert torch.equal(full(model.state_dict()["embedding.weight"]), wanted)


@ranks(2)
def test_freezing_and_unfreezing_after_sharding() -> None:
    plain, sharded = build(), shard(build())
    ((whole, part),) = batches(1, dist.get_rank(), 2)
    for frozen in (True, False):
        for model, tokens in ((plain, whole), (sharded, part)):
            model.blocks[0].requires_grad_(not frozen)
            model.blocks[1].up.bias.requires_grad_(not frozen)
            model.zero_grad()
            loss_of(model, tokens).backward()
        check_equal(plain, sharded)


@ranks(2)
def test_an_optimizer_from_before_sharding_is_found_at_its_first_step() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model)
    with pytest.raises(InvariantError, match="Build the optimizer after fully_shard"):
        optimizer.step()


@ranks(2)
def test_an_old_loss_after_an_update_and_a_new_forward() -> None:
    model = shard(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (first, second) = batches(2, dist.get_rank(), 2)
    old, new = loss_of(model, first[1]), loss_of(model, second[1])
    new.backward()
    optimizer.step()
    loss_of(model, second[1])
    with pytest.raises(InvariantError, match="changed between its forward and its backward"):
        old.backward()


@ranks(2)
def test_updates_that_no_counter_sees_reach_the_next_forward() -> None:
    plain, sharded = build(), shard(build())
    ((whole, _),) = batches(1, dist.get_rank(), 2)
    loss_of(sharded, whole)
    sharded.reshard()
    shards = [p.to_local() for p in sharded.parameters()]
    loss_of(sharded, whole)
    with torch.no_grad():
        torch._foreach_mul_(shards, 2.0)
        torch._foreach_mul_(list(plain.parameters()), 2.0)
    torch.testing.assert_close(loss_of(sharded, whole), loss_of(plain, whole))


@ranks(2)
def test_another_loss_after_a_backward_that_raised() -> None:
    plain, sharded = build(), shard(build())
    (first, second) = batches(2, dist.get_rank(), 2)
    good = loss_of(sharded, second[1])
    handle = sharded.blocks[1].down.register_full_backward_hook(lambda *_: 1 / 0)
    bad = loss_of(sharded, first[1])
    handle.remove()
    with pytest.raises(ZeroDivisionError):
        bad.backward()
    sharded.zero_grad()
    good.backward()
    loss_of(plain, second[0]).backward()
    check_equal(plain, sharded)


@ranks(2)
def test_a_submodule_that_ran_alone_before_its_root() -> None:
    plain, sharded = pair(lambda: Stack(lambda: nn.Linear(6, 6)))
    for model in (plain, sharded):
        alone = model.blocks[0](inputs()).sum()
        model(inputs()).sum().backward()
        alone.backward()
    check_equal(plain, sharded)


@ranks(2)
def test_a_gradient_from_outside_any_forward_is_reduced() -> None:
    plain, sharded = pair(lambda: Stack(lambda: nn.Linear(6, 6)))
    for model in (plain, sharded):
        loss = model(inputs()).sum()
        (model.head.weight**2).sum().backward(retain_graph=True)
        loss.backward()
    check_equal(plain, sharded)


@dataclass
class Wrapped:
    value: torch.Tensor


class Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@ranks(2)
@pytest.mark.parametrize("wrap", [Wrapped, Opaque])
def test_outputs_that_are_objects(wrap: Callable[[torch.Tensor], Wrapped]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.randn(6))
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> Wrapped:
            return wrap(self.linear(x) * self.gain)

    class Wrapping(Stack):
        def forward(self, x: torch.Tensor) -> Wrapped:
            for block in self.blocks:
                x = block(x).value
            return wrap(self.head(x))

    plain, sharded = pair(lambda: Wrapping(Block))
    for model in (plain, sharded):
        for _ in range(2):
            model(inputs()).value.sum().backward()
    check_equal(plain, sharded)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())


@ranks(2)
def test_an_input_that_is_a_leaf_beside_parameters_that_meet_alone() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.a * self.b)

    plain, sharded = pair(lambda: Stack(Product))
    x = inputs().requires_grad_()
    for model in (plain, sharded):
        for _ in range(3):
            model(x).sum().backward()
    check_equal(plain, sharded)
    assert not x._backward_hooks


@ranks(2)
def test_a_recomputation_that_stops_early() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.first(x)
            return self.second(hidden), hidden.pow(2).mean()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Inner()])
            self.head = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                output, extra = self.blocks[0](x)
                return output.sin(), extra.sin()

            output, extra = checkpoint(run, self.head(x), use_reentrant=False)
            return output.sum() + extra

    plain, sharded = pair(Outer)
    for model in (plain, sharded):
        model(inputs()).backward()
    check_equal(plain, sharded)


@ranks(2)
def test_hooks_after_accumulation_run_on_the_shards() -> None:
    plain, sharded = build(), shard(build())
    for model in (plain, sharded):
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    for whole, part in batches(3, dist.get_rank(), 2):
        loss_of(plain, whole).backward()
        loss_of(sharded, part).backward()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(full(q), p)
        assert q.grad is None


class ReturnsItsWeight(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[:2]


@ranks(2)
def test_what_a_freed_parameter_would_be_read_by_is_refused() -> None:
    model = fully_shard(ReturnsItsWeight(6, 6))
    with pytest.raises(InvariantError, match="returned one of its parameters or a view of one"):
        model(inputs())
    _, sharded = pair(lambda: Stack(lambda: nn.Linear(6, 6)))
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        sharded(inputs()).sum().backward(create_graph=True)
    with pytest.raises(UsageError, match="nothing to watch"), watch(fully_shard(nn.ReLU())):
        pass


@ranks(2)
def test_what_the_user_unsharded_stays_until_resharded() -> None:
    model: Model = shard(build())
    ((whole, _),) = batches(1, dist.get_rank(), 2)
    model.blocks[0].unshard()
    with torch.no_grad():
        loss_of(model, whole)
    assert not isinstance(model.blocks[0].up.weight, DTensor)
    model.blocks[0].reshard()
    assert isinstance(model.blocks[0].up.weight, DTensor)


@ranks(2)
def test_a_unit_may_run_before_its_root() -> None:
    """Torch's engine raises when the root runs then; here the unit is of the root's model."""
    plain, sharded = build(), shard(build())
    (first, second) = batches(2, dist.get_rank(), 2)
    for model, index in ((plain, 0), (sharded, 1)):
        hidden = nn.functional.one_hot(first[index] % 7, 7).float()
        model.blocks[0](hidden).square().mean().backward()
        for tokens in (first[index], second[index]):
            loss_of(model, tokens).backward()
    check_equal(plain, sharded)

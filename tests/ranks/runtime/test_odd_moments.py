"""Something happens at a moment when the engine has work under way, or has put some off.

A hook steps the optimizer, a parameter is frozen or changed, a gather fails. Each case went wrong
once. Torch's engine is the witness where it gets the case right, the unsharded model everywhere.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from collectives import OwnGather
from differential import (
    DIM,
    PLAIN,
    SHOAL,
    Block,
    Engine,
    Stack,
    check_engines_agree,
    check_like_plain,
    copies,
    error_of,
    gradients,
    loss_of,
    loss_on,
    named_parameters,
    seeded,
    stack,
    two_axes,
)
from harness import ranks
from shoal.errors import InvariantError
from shoal.runtime.module_state import state_of
from shoal.runtime.observe import plan_of, watch


def check_shoal(scenario: Callable[..., Any], *args: Any) -> None:
    """Where torch's engine is no witness, the unsharded model is the only one."""
    check_like_plain(scenario(SHOAL, *args), scenario(PLAIN, *args))


def backward(model: nn.Module, x: torch.Tensor) -> None:
    loss_on(model, x).backward()


def scale(module: nn.Module) -> None:
    """Change every weight in place."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)


class Repeated(Stack):
    """Runs its only block twice, so that a backward may reduce it twice."""

    def __init__(self) -> None:
        super().__init__(num=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (block,) = self.blocks
        return self.head(block(block(self.first(x))))


def stepped_by_a_hook(engine: Engine) -> Any:
    model = engine.shard(stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    # All of one unit, whose gradients come when every other unit's have been reduced.
    last = [*model.first.parameters(), *model.head.parameters()]
    arrived: list[nn.Parameter] = []

    def step(parameter: nn.Parameter) -> None:
        arrived.append(parameter)
        if len(arrived) == len(last):
            arrived.clear()
            optimizer.step()
            optimizer.zero_grad()

    for parameter in last:
        parameter.register_post_accumulate_grad_hook(step)
    for x in engine.batches():
        backward(model, x)
    return copies(named_parameters(model))


@ranks(2)
def test_a_hook_on_the_last_gradients_finds_all_others_there() -> None:
    check_engines_agree(stepped_by_a_hook)


def frozen_between_backwards(engine: Engine) -> Any:
    model = engine.shard(seeded(Repeated))
    first, second = engine.batches(2)
    if engine.is_sharded:
        model.set_requires_gradient_sync(False)
    backward(model, first)
    if engine.is_sharded:
        model.set_requires_gradient_sync(True)
    model.blocks[0].up.weight.requires_grad_(False)
    backward(model, second)
    return gradients(model)


@ranks(2)
def test_two_reductions_of_a_unit_that_send_different_parameters() -> None:
    check_engines_agree(frozen_between_backwards)


def changed_one_by_one(engine: Engine) -> Any:
    model = engine.shard(stack())
    (x,) = engine.batches(1)
    losses = []
    with torch.no_grad():
        model(x)
        for block in model.blocks:
            scale(block)  # its gather was started with the block before
            losses.append(engine.mean(loss_on(block, x)))
    return losses


@ranks(2)
def test_a_block_changed_after_its_gather_was_started_computes_with_new_weights() -> None:
    check_engines_agree(changed_one_by_one)


def changed_by_a_forward_hook(engine: Engine, trains: bool) -> Any:
    model = engine.shard(stack())
    x, y = engine.batches(2)
    model.blocks[1].register_forward_pre_hook(lambda *_: scale(model.blocks[2]))
    with torch.set_grad_enabled(trains):
        model(x)
        loss = loss_on(model, y)
    if trains:
        loss.backward()
    return engine.mean(loss), gradients(model)


@ranks(2)
@pytest.mark.parametrize("trains", [False, True])
def test_a_forward_hook_may_change_the_next_block(trains: bool) -> None:
    check_engines_agree(changed_by_a_forward_hook, trains)


class FailingGather(OwnGather):
    """Has no memory, once, when asked to."""

    fails = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise torch.OutOfMemoryError("asked to")
        return super().allocate(size, dtype=dtype, device=device)


@ranks(2)
@pytest.mark.parametrize("grad", [False, True])
def test_a_gather_that_failed_leaves_nothing_half_done(grad: bool) -> None:
    plain, sharded, gather = stack(), SHOAL.shard(stack()), FailingGather()
    sharded.blocks[1].set_custom_all_gather(gather)
    (x,) = SHOAL.batches(1)
    with torch.set_grad_enabled(grad):
        sharded(x)
        gather.fails = True
        with pytest.raises(torch.OutOfMemoryError, match="asked to"):
            sharded(x)
        torch.testing.assert_close(sharded(x), plain(x))
    assert all(isinstance(p, DTensor) for p in sharded.blocks.parameters())  # freed again


def trained_on_after_an_error(engine: Engine) -> Any:
    model = engine.shard(stack())
    (x,) = engine.batches(1)

    def fail(_: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = model.first.weight.register_post_accumulate_grad_hook(fail)
    # Kept to the end, as a notebook keeps it, with every frame that it passed through.
    error = error_of(lambda: backward(model, x))
    assert isinstance(error, ZeroDivisionError)
    handle.remove()
    model.zero_grad()
    backward(model, x)
    return gradients(model)


@ranks(2)
def test_an_error_from_the_end_of_a_backward_may_be_kept() -> None:
    check_shoal(trained_on_after_an_error)


def stepped_after_assignment(engine: Engine) -> Any:
    model = engine.shard(stack())
    if engine.is_sharded:
        model.set_reshard_after_backward(False)
    model.load_state_dict(copies(model.state_dict()), assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
    optimizer.step()  # there are no gradients: this is how loaders make an optimizer's state
    for x in engine.batches():
        backward(model, x)
        optimizer.step()
        optimizer.zero_grad()
    return copies(model.state_dict())  # shows the shards, though units stay full


@ranks(2)
def test_an_optimizer_that_stepped_on_assigned_parameters_before_they_were_used() -> None:
    check_shoal(stepped_after_assignment)


def evaluated_around_a_step(engine: Engine) -> Any:
    model = engine.shard(stack(), reshard_after_forward=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x,) = engine.batches(1)
    backward(model, x)
    model(x)  # without a backward, so that units stay with the smaller groups
    optimizer.step()
    return engine.mean(loss_on(model, x))


@ranks(4)
def test_a_step_reaches_units_that_are_kept_within_smaller_groups() -> None:
    check_shoal(evaluated_around_a_step)


@ranks(4)
@pytest.mark.parametrize("is_trained_first", [False, True])
def test_partial_sums_refuse_those_of_other_parameters(is_trained_first: bool) -> None:
    """The sums are of one size where one layer joins as another leaves: no shape gives it away."""

    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(3)))

    model = SHOAL.shard(stack(layers, num=1), mesh=two_axes())
    first, second, _ = model.blocks[0]
    x, y = SHOAL.batches(2)
    second.weight.requires_grad_(is_trained_first)
    model.set_requires_all_reduce(False)
    backward(model, x)
    model.set_requires_all_reduce(True)
    first.weight.requires_grad_(False)
    second.weight.requires_grad_(True)
    with pytest.raises(InvariantError, match=r"'blocks\.0' were frozen or unfrozen while partial"):
        backward(model, y)


class Recomputed(nn.Module):
    """Blocks alone, under checkpoints that come first in backward and run one of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


def recomputed(engine: Engine, around: str) -> Any:
    model = engine.shard(seeded(Stack if around == "model" else Recomputed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for x in engine.batches():
        x.requires_grad_()
        output = checkpoint(model, x, use_reentrant=True) if around == "model" else model(x)
        loss_of(output).backward()
        optimizer.step()
        optimizer.zero_grad()
    return copies(named_parameters(model))


@ranks(2)
@pytest.mark.parametrize("around", ["model", "blocks"])
def test_reentrant_checkpoints_around(around: str) -> None:
    check_engines_agree(recomputed, around)


@ranks(2)
def test_calls_of_a_block_by_itself_are_not_remembered() -> None:
    model = SHOAL.shard(stack())
    (x,) = SHOAL.batches(1)
    state = state_of(model.blocks[0])
    assert state is not None
    (unit,) = state.units
    num_references = []
    with torch.no_grad():
        model(x)
        for _ in range(4):
            model.blocks[0](x)
            num_references.append(sys.getrefcount(unit))
    assert len(set(num_references)) == 1, num_references


def frozen_while_full(engine: Engine) -> Any:
    model = engine.shard(stack())
    if engine.is_sharded:
        model.set_reshard_after_backward(False)
    shards = named_parameters(model)  # later the model shows full parameters
    first, second = engine.batches(2)
    backward(model, first)
    for parameter in shards.values():
        parameter.grad = None
    shards["blocks.1.up.weight"].requires_grad_(False)
    backward(model, second)
    return copies({name: parameter.grad for name, parameter in shards.items()})


@ranks(2)
def test_a_parameter_frozen_while_its_unit_stays_full() -> None:
    check_shoal(frozen_while_full)


class Aliasing(torch.autograd.Function):
    """Gives its input's memory away under another name."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.data

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class Leaking(Block):
    """Returns its weight through a function of the user's own, which makes it no view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Aliasing.apply(self.up.weight)


@ranks(2)
def test_an_output_that_shares_a_parameters_memory_is_refused() -> None:
    model = SHOAL.shard(stack(Leaking, num=1))
    with pytest.raises(InvariantError, match=r"'blocks\.0' returned one of its parameters"):
        model(*SHOAL.batches(1))


@ranks(2)
@pytest.mark.parametrize("kind", ["freed root", "block that runs twice"])
def test_the_plan_knows_of_a(kind: str) -> None:
    if kind == "freed root":
        model = SHOAL.shard(stack(), reshard_after_forward=True)
    else:
        model = SHOAL.shard(seeded(Repeated))
    x, y = SHOAL.batches(2)
    backward(model, x)
    with watch(model) as recorder:
        backward(model, y)
    done = [(action.kind, action.unit) for action in recorder.actions()]
    assert done == [(action.kind, action.unit) for action in plan_of(model).schedule()]

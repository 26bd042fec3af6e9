"""Ranks with different numbers of batches train what one process trains on all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shoal
from differential import DIM, check_close, loss_of, stack, two_axes
from harness import ranks
from shoal.errors import RankError, UsageError
from shoal.fsdp import FullyShardedDataParallel, fully_shard
from shoal.fsdp.replicate_with_fsdp import replicate
from shoal.layout import Even, Flat, Layout, Rows, Whole

Make = Callable[[Any], torch.optim.Optimizer]
adam: Make = partial(torch.optim.AdamW, lr=1e-2)


def num_batches(rank: int) -> int:
    """Ranks have 1, 4, 0, 2 batches."""
    return (1, 4, 0, 2)[rank % 4]


def batches_of(rank: int, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(3, DIM, generator=generator) for _ in range(num)]


class Unsharded:
    """One process that has the batches of all ranks."""

    def __init__(self, counts: Sequence[int], *, by_all: bool = True, model: Any = None) -> None:
        self.model = stack() if model is None else model
        self.batches = [batches_of(rank, num) for rank, num in enumerate(counts)]
        self.by_all = by_all

    def backward(self, step: int) -> None:
        """The gradients of all ranks that have a batch left, added up and divided."""
        left = [batches[step] for batches in self.batches if step < len(batches)]
        divisor = len(self.batches) if self.by_all else len(left)
        for batch in left:
            (loss_of(self.model(batch)) / divisor).backward()

    def train(self, make: Make = adam, max_norm: float | None = None) -> None:
        optimizer = make(self.model.parameters())
        for step in range(max(map(len, self.batches))):
            self.backward(step)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()


def sharded_by(shard: Callable[..., Any], **options: Any) -> Any:
    model: Any = stack()
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    return model


def counts(world_size: int) -> list[int]:
    return [num_batches(rank) for rank in range(world_size)]


def own_batches() -> list[torch.Tensor]:
    return batches_of(dist.get_rank(), num_batches(dist.get_rank()))


def train(model: Any, optimizer: torch.optim.Optimizer, *also: Any, **options: Any) -> None:
    """An ordinary loop."""
    with shoal.join(model, optimizer, *also, **options):
        for batch in own_batches():
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()


@ranks(2, 4)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [Even(), Flat(), Rows(), Whole()], ids=repr)
@pytest.mark.parametrize("by_all", [True, False])
def test_weights_are_those_of_one_process(world_size: int, layout: Layout, by_all: bool) -> None:
    model = sharded_by(fully_shard, layout=layout)
    train(model, adam(model.parameters()), divide_by_initial_world_size=by_all)
    plain = Unsharded(counts(world_size), by_all=by_all)
    plain.train()
    check_close(model, plain.model)


def wrapped(**options: Any) -> Any:
    model: Any = stack()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, use_orig_params=True, **options)
    return FullyShardedDataParallel(model, use_orig_params=True, **options)


def check_weights(model: Any, plain: nn.Module) -> None:
    """The whole weights, whichever engine has them."""
    if isinstance(model, FullyShardedDataParallel):
        found = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in in_full_of(model)}
    else:
        found = {n: shoal_full(p) for n, p in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            found[name], parameter.detach(), msg=lambda m, n=name: f"{n} {m}"
        )


def in_full_of(model: Any) -> list[tuple[str, torch.Tensor]]:
    with FullyShardedDataParallel.summon_full_params(model):
        return [(name, p.detach().clone()) for name, p in model.named_parameters()]


def shoal_full(parameter: torch.Tensor) -> torch.Tensor:
    whole: Any = parameter.detach()
    return whole.full_tensor() if hasattr(whole, "full_tensor") else whole


@ranks(2, 4)
@pytest.mark.parametrize("by_all", [True, False])
def test_the_wrapper_too(world_size: int, by_all: bool) -> None:
    model = wrapped()
    train(model, adam(model.parameters()), divide_by_initial_world_size=by_all)
    plain = Unsharded(counts(world_size), by_all=by_all)
    plain.train()
    check_weights(model, plain.model)
    train_evenly(model, plain)


def train_evenly(model: Any, plain: Unsharded) -> None:
    """A later epoch in which all ranks have as many batches: nobody was left behind."""
    size = dist.get_world_size()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain.model)]
    again = Unsharded([2] * size, model=plain.model)
    for step in range(2):
        loss_of(model(again.batches[dist.get_rank()][step])).backward()
        again.backward(step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_weights(model, plain.model)


@ranks(4)
def test_replicas(world_size: int) -> None:
    model = sharded_by(fully_shard, mesh=two_axes())
    train(model, adam(model.parameters()))
    plain = Unsharded(counts(world_size))
    plain.train()
    check_weights(model, plain.model)
    train_evenly(model, plain)


@ranks(2)
def test_replicate(world_size: int) -> None:
    model = sharded_by(replicate)
    train(model, adam(model.parameters()))
    plain = Unsharded(counts(world_size))
    plain.train()
    check_weights(model, plain.model)
    train_evenly(model, plain)


@ranks(4)
@pytest.mark.parametrize("reshard", [True, False, 1])
def test_units_that_stay_full(world_size: int, reshard: bool | int) -> None:
    model = sharded_by(fully_shard, reshard_after_forward=reshard)
    train(model, adam(model.parameters()))
    plain = Unsharded(counts(world_size))
    plain.train()
    check_close(model, plain.model)
    train_evenly(model, plain)


@ranks(2, 4)
@pytest.mark.parametrize("wraps", [False, True])
def test_clipping(world_size: int, wraps: bool) -> None:
    model = wrapped() if wraps else sharded_by(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with shoal.join(model, optimizer):
        for batch in own_batches():
            loss_of(model(batch)).backward()
            if wraps:
                model.clip_grad_norm_(0.05)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    plain = Unsharded(counts(world_size))
    plain.train(partial(torch.optim.SGD, lr=0.5), max_norm=0.05)
    check_weights(model, plain.model)


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat()], ids=repr)
def test_accumulation_and_zeroes_in_place(world_size: int, layout: Layout) -> None:
    """Every second backward reduces: the settings of the loop reach ranks that do not run it."""
    model = sharded_by(fully_shard, layout=layout)
    optimizer = adam(model.parameters())
    with shoal.join(model, optimizer):
        for number, batch in enumerate(own_batches()):
            model.set_requires_gradient_sync(number % 2 == 1)
            loss_of(model(batch)).backward()
            if number % 2 == 1:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    plain = Unsharded(counts(world_size))
    step = adam(plain.model.parameters())
    for number in range(4 // (1 if world_size > 1 else 2)):
        plain.backward(number)
        if number % 2 == 1:
            step.step()
            step.zero_grad(set_to_none=False)
    check_weights(model, plain.model)
    train_evenly(model, plain)


@ranks(2)
def test_accumulation_in_the_wrapper(world_size: int) -> None:
    model = wrapped()
    optimizer = adam(model.parameters())
    with shoal.join(model, optimizer):
        for number, batch in enumerate(own_batches()):
            if number % 2 == 0:
                with model.no_sync():
                    loss_of(model(batch)).backward()
                continue
            loss_of(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    plain = Unsharded(counts(world_size))
    step = adam(plain.model.parameters())
    for number in range(4):
        plain.backward(number)
        if number % 2 == 1:
            step.step()
            step.zero_grad()
    check_weights(model, plain.model)


@ranks(2)
def test_freezing_in_the_loop_and_a_schedule(world_size: int) -> None:
    model, plain = sharded_by(fully_shard), Unsharded(counts(world_size))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.3) for one in (model, plain.model)]
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]

    def freeze(which: Any, number: int) -> None:
        for parameter in which.blocks[0].parameters():
            parameter.requires_grad_(number % 2 == 0)

    with shoal.join(model, optimizers[0], schedules[0]):
        for number, batch in enumerate(own_batches()):
            freeze(model, number)
            loss_of(model(batch)).backward()
            optimizers[0].step()
            schedules[0].step()
            optimizers[0].zero_grad()
    for number in range(4):
        freeze(plain.model, number)
        plain.backward(number)
        optimizers[1].step()
        schedules[1].step()
        optimizers[1].zero_grad()
    check_weights(model, plain.model)
    assert schedules[0].state_dict()["last_epoch"] == 4
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


@ranks(2, 4)
def test_a_scaler(world_size: int) -> None:
    model = sharded_by(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    with shoal.join(model, optimizer, scaler):
        for batch in own_batches():
            scaler.scale(loss_of(model(batch))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    plain = Unsharded(counts(world_size))
    plain.train(partial(torch.optim.SGD, lr=0.5), max_norm=0.1)
    check_weights(model, plain.model)
    assert scaler.get_scale() == 4096.0


@ranks(2)
def test_a_scaler_that_was_not_given_is_refused(world_size: int) -> None:
    model = sharded_by(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loop() -> None:
        with shoal.join(model, optimizer):
            for batch in own_batches():
                scaler.scale(loss_of(model(batch))).backward()
                scaler.step(optimizer)

    with pytest.raises((NotImplementedError, RankError), match="gradient scaler"):
        loop()


def widened(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.pad(output, (0, DIM - output.shape[-1]))


@ranks(2)
def test_several_models_in_one_loop(world_size: int) -> None:
    """Two models with two optimizers, where the second one's backward goes through the first."""
    torch.manual_seed(0)
    plains = [stack(), stack(num=2)]
    pair = [sharded_by(fully_shard), stack(num=2)]
    fully_shard(pair[1])
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (*pair, *plains)]
    with shoal.join(*pair, *optimizers[:2]):
        for batch in own_batches():
            loss_of(pair[1](widened(pair[0](batch)))).backward()
            for optimizer in optimizers[:2]:
                optimizer.step()
            loss_of(pair[0](batch)).backward()
            optimizers[0].step()
            for optimizer in optimizers[:2]:
                optimizer.zero_grad()
    batches = [batches_of(rank, num) for rank, num in enumerate(counts(world_size))]
    for step in range(4):
        left = [one[step] for one in batches if step < len(one)]
        for batch in left:
            (loss_of(plains[1](widened(plains[0](batch)))) / world_size).backward()
        for optimizer in optimizers[2:]:
            optimizer.step()
        for batch in left:
            (loss_of(plains[0](batch)) / world_size).backward()
        optimizers[2].step()
        for optimizer in optimizers[2:]:
            optimizer.zero_grad()
    for model, plain in zip(pair, plains, strict=True):
        check_weights(model, plain)


@ranks(2, 4)
def test_a_break_between_forward_and_backward(world_size: int) -> None:
    """What one rank has left undone is the others' backward without its part."""
    model = sharded_by(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with shoal.join(model, optimizer):
        for number, batch in enumerate(batches_of(dist.get_rank(), 3)):
            loss = loss_of(model(batch))
            if number == dist.get_rank():
                break
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.reshard()  # the last forward had no backward
    plain = Unsharded([min(rank, 3) for rank in range(world_size)])
    plain.train(partial(torch.optim.SGD, lr=0.1))
    check_weights(model, plain.model)
    train_evenly(model, plain)


@ranks(2, 4)
def test_an_exception_on_one_rank_ends_all_loops(world_size: int) -> None:
    model = sharded_by(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with shoal.join(model, optimizer):
            for number, batch in enumerate(batches_of(dist.get_rank(), 3)):
                loss_of(model(batch)).backward()
                if dist.get_rank() == 1 and number == 1:
                    raise KeyError("no such file")
                optimizer.step()
                optimizer.zero_grad()

    expected = KeyError if dist.get_rank() == 1 else RankError
    with pytest.raises(expected, match="no such file") as caught:
        loop()
    if dist.get_rank() != 1:
        assert "rank 1 left the loop" in str(caught.value)


@ranks(2)
def test_other_collectives_are_refused_by_name(world_size: int) -> None:
    model = sharded_by(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with shoal.join(model, optimizer):
            for batch in own_batches():
                loss = loss_of(model(batch))
                loss.backward()
                dist.all_reduce(loss.detach())

    with pytest.raises((NotImplementedError, RankError), match="collective 'allreduce'"):
        loop()
    dist.all_reduce(torch.ones(1))  # outside it is as it was


@ranks(2)
def test_an_optimizer_that_was_not_given_is_refused(world_size: int) -> None:
    model = sharded_by(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with shoal.join(model):
            for batch in own_batches():
                loss_of(model(batch)).backward()
                optimizer.step()

    with pytest.raises((NotImplementedError, RankError), match="by an optimizer that join was not"):
        loop()


@ranks(2)
def test_without_optimizers_those_that_stepped_last(world_size: int) -> None:
    model, plain = sharded_by(fully_shard), Unsharded([1, 1])
    optimizers = [adam(one.parameters()) for one in (model, plain.model)]
    (batch,) = batches_of(dist.get_rank(), 1)
    loss_of(model(batch)).backward()
    plain.backward(0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    with shoal.join(model):
        for batch in own_batches():
            loss_of(model(batch)).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    again = Unsharded(counts(world_size), model=plain.model)
    for step in range(4):
        again.backward(step)
        optimizers[1].step()
        optimizers[1].zero_grad()
    check_weights(model, plain.model)


@ranks(2, 4)
def test_an_evaluation_needs_no_optimizer(world_size: int) -> None:
    model, plain = sharded_by(fully_shard), stack()
    with shoal.join(model), torch.no_grad():
        found = [model(batch) for batch in own_batches()]
    with torch.no_grad():
        expected = [plain(batch) for batch in own_batches()]
    torch.testing.assert_close(found, expected)


@ranks(2)
def test_ranks_that_go_different_ways_are_told(world_size: int) -> None:
    model = sharded_by(fully_shard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        with shoal.join(model, optimizer):
            for batch in batches_of(0, 2):
                loss = loss_of(model(batch))
                if dist.get_rank() == 0:
                    loss.backward()
                optimizer.step()

    with pytest.raises(RankError, match=r"the backward of model 0.*SGD\.step"):
        loop()


@ranks(2)
def test_models_that_nobody_sharded_are_refused(world_size: int) -> None:
    with pytest.raises(UsageError, match="none of the models is sharded"), shoal.join(stack()):
        pass
    with pytest.raises(UsageError, match="got a int"), shoal.join(3):
        pass

"""Several backwards for one update: when gradients are summed, reduced and visible."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from collectives import log_traffic
from differential import (
    DIM,
    SHOAL,
    Engine,
    check_engines_agree,
    error_of,
    gradients,
    loss_of,
    snapshot,
    stack,
    two_axes,
)
from harness import ranks
from shoal import fully_shard
from shoal.layout import Even, Flat, Layout, Whole


def is_last(index: int, every: int) -> bool:
    return index % every == every - 1


def accumulate(
    engine: Engine,
    *,
    num: int = 6,
    every: int = 3,
    reshard_after_forward: bool | None = None,
    reshard_after_backward: bool = True,
    hint: bool = False,
    set_to_none: bool = True,
) -> list[Any]:
    """Train with an update after `every` backwards, of which only the last one communicates."""
    model = engine.shard(stack(), reshard_after_forward=reshard_after_forward)
    shards = list(model.parameters())
    optimizer = torch.optim.AdamW(shards, lr=1e-2)
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(num)):
        last = is_last(index, every)
        if engine.is_sharded:
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or reshard_after_backward)
            if hint:
                model.set_is_last_backward(last)
        loss = loss_of(model(batch))
        loss.backward()
        seen.append(engine.mean(loss))
        if last:
            seen.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        elif engine.is_sharded and index < every:
            # Nothing is reduced yet, so the optimizer's parameters have no gradient.
            assert all(shard.grad is None for shard in shards)
    return [*seen, snapshot(model, optimizer)]


@ranks(2)
@pytest.mark.parametrize("reshard_after_backward", [True, False])
@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
def test_updates_after_several_backwards(
    reshard_after_forward: bool | None, reshard_after_backward: bool
) -> None:
    def scenario(engine: Engine) -> list[Any]:
        return accumulate(
            engine,
            reshard_after_forward=reshard_after_forward,
            reshard_after_backward=reshard_after_backward,
        )

    check_engines_agree(scenario)


@ranks(4)
@pytest.mark.parametrize("reshard_after_backward", [True, False])
def test_updates_after_several_backwards_on_four_ranks(reshard_after_backward: bool) -> None:
    def scenario(engine: Engine) -> list[Any]:
        return accumulate(engine, reshard_after_backward=reshard_after_backward)

    check_engines_agree(scenario)


@ranks(2)
def test_the_hint_which_backward_is_last_changes_no_number() -> None:
    check_engines_agree(lambda engine: accumulate(engine, hint=True))


@ranks(2)
def test_gradients_that_are_zeroed_instead_of_dropped() -> None:
    check_engines_agree(lambda engine: accumulate(engine, set_to_none=False))


def hinted_with_sync(engine: Engine) -> list[Any]:
    """Every backward communicates; only the last one is announced as such."""
    model = engine.shard(stack())
    for index, batch in enumerate(engine.batches(3)):
        if engine.is_sharded:
            model.set_is_last_backward(index == 2)
        loss_of(model(batch)).backward()
    return [gradients(model)]


@ranks(2)
def test_reductions_of_earlier_backwards_have_arrived_after_the_last() -> None:
    check_engines_agree(hinted_with_sync)


def alternate(engine: Engine, syncs: list[bool]) -> list[Any]:
    """Gradients add up over all backwards, however many of them communicate."""
    model = engine.shard(stack())
    seen = []
    for sync, batch in zip(syncs, engine.batches(len(syncs)), strict=True):
        if engine.is_sharded:
            model.set_requires_gradient_sync(sync)
        loss_of(model(batch)).backward()
        if sync:
            seen.append(gradients(model))
    return seen


@ranks(2)
def test_sync_that_is_switched_on_and_off() -> None:
    check_engines_agree(alternate, [True, False, True, False, False, True])
    check_engines_agree(alternate, [False, True, True, False, True])


def partly(engine: Engine, names: list[str], recurse: bool) -> list[Any]:
    """The units named are not reduced; what they have afterwards, and after a full backward."""
    model = engine.shard(stack())
    seen = []
    for index, batch in enumerate(engine.batches(2)):
        for name in names:
            model.get_submodule(name).set_requires_gradient_sync(index == 1, recurse=recurse)
        loss_of(model(batch)).backward()
        seen.append(gradients(model))
    return seen


@ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("names", [[""], ["blocks.1"], ["blocks.0", "blocks.2"]])
def test_units_that_are_not_reduced(names: list[str], recurse: bool) -> None:
    check_engines_agree(partly, names, recurse, plain=False)
    first, _ = partly(SHOAL, names, recurse)
    for name, gradient in first.items():
        expected = any(belongs(name, unit, recurse) for unit in names)
        assert (gradient is None) == expected, name


def belongs(parameter: str, unit: str, recurse: bool) -> bool:
    """Whether a setter called on `unit` reaches the parameter."""
    if unit:
        return parameter.startswith(f"{unit}.")
    return recurse or not parameter.startswith("blocks.")


class Branches(nn.Module):
    """Uses one of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(torch.tanh(self.blocks[branch](x)))


def branches(engine: Engine, order: list[int], reshard: bool) -> list[Any]:
    torch.manual_seed(0)
    model = engine.shard(Branches())
    for index, batch in enumerate(engine.batches(len(order))):
        last = index == len(order) - 1
        if engine.is_sharded:
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last or reshard)
        loss_of(model(batch, order[index])).backward()
    return [gradients(model)]


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 0, 1, 0]])
def test_a_unit_whose_last_backward_came_before_the_reduction(
    order: list[int], reshard: bool
) -> None:
    check_engines_agree(branches, order, reshard)


def evaluated_between(engine: Engine, reshard: bool) -> list[Any]:
    model = engine.shard(stack())
    seen = []
    for index, batch in enumerate(engine.batches(3)):
        if engine.is_sharded:
            model.set_requires_gradient_sync(index == 2)
            model.set_reshard_after_backward(index == 2 or reshard)
        loss_of(model(batch)).backward()
        with torch.no_grad():
            seen.append(engine.mean(loss_of(model(batch))))
    if engine.is_sharded:
        model.reshard()  # torch's root stays gathered after any forward
    return [*seen, gradients(model)]


@ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_evaluation_between_backwards_that_are_not_reduced(reshard: bool) -> None:
    check_engines_agree(evaluated_between, reshard)


def traffic(engine: Engine, reshard_after_forward: bool, reshard_after_backward: bool) -> list[Any]:
    model = engine.shard(stack(num=2), reshard_after_forward=reshard_after_forward)
    log = log_traffic(model)
    for index, batch in enumerate(engine.batches(3)):
        model.set_requires_gradient_sync(index == 2)
        model.set_reshard_after_backward(index == 2 or reshard_after_backward)
        loss_of(model(batch)).backward()
        log.append("---")
    return sorted_steps(log)


def sorted_steps(log: list[str]) -> list[list[str]]:
    """The collectives of each step; their order inside it is the schedule's business."""
    steps: list[list[str]] = [[]]
    for line in log:
        if line == "---":
            steps.append([])
        else:
            steps[-1].append(line)
    return [sorted(step) for step in steps]


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("reshard_after_backward", [True, False])
def test_what_accumulation_communicates(
    reshard_after_forward: bool, reshard_after_backward: bool
) -> None:
    check_engines_agree(traffic, reshard_after_forward, reshard_after_backward, plain=False)


def registered(model: nn.Module) -> list[bool]:
    return [isinstance(p, DTensor) for p in model.parameters()]


def switched_after_forward(engine: Engine, value: bool, recurse: bool) -> list[Any]:
    """What is registered between forward and backward, before and after the switch."""
    model = engine.shard(stack(num=2))
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(3)):
        if index == 1:
            model.set_reshard_after_forward(value, recurse)
        if index == 2:
            model.set_reshard_after_forward(not value, recurse=recurse)
        loss = loss_of(model(batch))
        seen.append(registered(model))
        loss.backward()
        seen.append(registered(model))
        seen.append(gradients(model))
    return seen


@ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("value", [True, False])
def test_resharding_after_forward_can_be_switched(value: bool, recurse: bool) -> None:
    check_engines_agree(switched_after_forward, value, recurse, plain=False)


def switched_after_backward(engine: Engine, recurse: bool) -> list[Any]:
    model = engine.shard(stack(num=2))
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(3)):
        model.set_requires_gradient_sync(index == 2)
        model.set_reshard_after_backward(index == 2, recurse=recurse)
        loss_of(model(batch)).backward()
        if index == 2 and not recurse:
            model.reshard()
        seen.append(registered(model))
    return [*seen, gradients(model)]


@ranks(2)
@pytest.mark.parametrize("recurse", [True, False])
def test_resharding_after_backward_can_be_switched(recurse: bool) -> None:
    check_engines_agree(switched_after_backward, recurse, plain=False)


def replicated(engine: Engine, every: int) -> list[Any]:
    """Reduce-scatter every time; all-reduce over the replicas with the last backward only."""
    model = engine.shard(stack(), mesh=two_axes())
    for index, batch in enumerate(engine.batches(every)):
        if engine.is_sharded:
            model.set_requires_all_reduce(index == every - 1)
        loss_of(model(batch)).backward()
    return [gradients(model)]


@ranks(4)
@pytest.mark.parametrize("every", [1, 3])
def test_replicas_are_reduced_with_the_last_backward(every: int) -> None:
    check_engines_agree(replicated, every)


def replicated_and_evaluated(engine: Engine, reshard: bool, mode: Callable[[], Any]) -> list[Any]:
    """Updates after three backwards, each of them followed by an evaluation."""
    model = engine.shard(stack(), mesh=two_axes())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for index, batch in enumerate(engine.batches(6)):
        last = is_last(index, 3)
        if engine.is_sharded:
            model.set_requires_all_reduce(last)
            model.set_reshard_after_backward(last or reshard)
        loss_of(model(batch)).backward()
        model.eval()
        with mode():
            seen.append(engine.mean(loss_of(model(batch))))
        model.train()
        if engine.is_sharded:
            model.reshard()  # torch's root stays gathered after any forward
        if last:
            seen.append(gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    return [*seen, snapshot(model, optimizer)]


@ranks(4)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_backwards_that_keep_replicas_apart(
    reshard: bool, mode: Callable[[], Any]
) -> None:
    check_engines_agree(replicated_and_evaluated, reshard, mode, exact=True)


@ranks(4)
def test_replicas_without_sync() -> None:
    def scenario(engine: Engine) -> list[Any]:
        model = engine.shard(stack(), mesh=two_axes())
        for index, batch in enumerate(engine.batches(3)):
            if engine.is_sharded:
                model.set_requires_gradient_sync(index == 2)
            loss_of(model(batch)).backward()
        return [gradients(model)]

    check_engines_agree(scenario)


def mistakes(engine: Engine) -> list[Any]:
    model = engine.shard(stack(num=1))
    return [
        error_of(lambda: model.set_reshard_after_forward(2)),
        error_of(lambda: model.set_reshard_after_forward(None)),
        error_of(lambda: model.set_requires_gradient_sync(True, False)),
        error_of(lambda: model.set_reshard_after_backward(True, False)),
        error_of(lambda: model.set_requires_all_reduce(True, False)),
    ]


@ranks(2)
def test_wrong_arguments_are_refused_as_torch_refuses_them() -> None:
    check_engines_agree(mistakes, plain=False)


@ranks(2, 4)
@pytest.mark.parametrize("layout", [Even(), Flat(), Whole()], ids=str)
def test_sums_that_wait_go_to_parameters_that_were_assigned_since(layout: Layout) -> None:
    """The backward that reduces them comes to another unit."""
    torch.manual_seed(0)
    model: Any = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))
    inputs = torch.randn(2, DIM)
    wanted = torch.autograd.grad(model[0](inputs).square().sum(), list(model[0].parameters()))
    root: Any = nn.Sequential(*model)
    for module in (*root, root):
        fully_shard(module, layout=layout)
    root(inputs)
    root.set_requires_gradient_sync(False)
    root[0](inputs).square().sum().backward()
    root.load_state_dict({k: v.clone() for k, v in root.state_dict().items()}, assign=True)
    root.set_requires_gradient_sync(True)
    root[1](inputs).sum().backward()
    for parameter, grad in zip(root[0].parameters(), wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.full_tensor(), grad)

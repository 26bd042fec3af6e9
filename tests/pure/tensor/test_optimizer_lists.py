"""Multi-tensor steps read local tensors where that is right, and sharded ones everywhere else."""

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from cuts import parameters, random_tensors
from shoal.comm.local import run_local
from shoal.errors import UsageError
from shoal.layout import Flat, Whole
from shoal.tensor import ShardedTensor
from shoal.tensor.optimizer_lists import grouped

Build = Callable[[Iterable[Any]], torch.optim.Optimizer]
optim = torch.optim

STEPS: dict[str, Build] = {
    "Adadelta": lambda p: optim.Adadelta(p, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, foreach=True),
    "Adagrad fused": lambda p: optim.Adagrad(p, fused=True),
    "Adam fused, amsgrad": lambda p: optim.Adam(p, fused=True, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "Adamax": lambda p: optim.Adamax(p, foreach=True),
    "ASGD": lambda p: optim.ASGD(p, foreach=True),
    "NAdam": lambda p: optim.NAdam(p, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, foreach=True),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True, foreach=True),
    "Rprop": lambda p: optim.Rprop(p, foreach=True),
    "SGD": lambda p: optim.SGD(p, momentum=0.9, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, momentum=0.9, fused=True),
}


def with_gradients(*dtypes: torch.dtype) -> list[Any]:
    made: list[Any] = []
    for seed, dtype in enumerate(dtypes or (torch.float32,)):
        made += parameters(random_tensors(seed=seed, dtype=dtype), Flat())
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


@pytest.mark.parametrize("name", STEPS)
def test_once_there_is_state_no_operation_sees_a_sharded_tensor(name: str) -> None:
    def rank() -> None:
        optimizer = STEPS[name](with_gradients())
        optimizer.step()
        with patch.object(ShardedTensor, "__torch_dispatch__", side_effect=AssertionError):
            optimizer.step()

    run_local(1, rank)


@pytest.mark.parametrize("name", STEPS)
def test_dtypes_are_stepped_group_by_group(name: str) -> None:
    def rank() -> None:
        mixed = with_gradients(torch.float32, torch.float64, torch.float32)
        mixed = [tensor for pair in zip(mixed[::2], mixed[1::2], strict=False) for tensor in pair]
        plain = [nn.Parameter(parameter.local.clone()) for parameter in mixed]
        for parameter, sharded in zip(plain, mixed, strict=True):
            parameter.grad = torch.ones_like(parameter)
            assert sharded.kind == (parameter.device, parameter.dtype)
        ours, expected = STEPS[name](mixed), STEPS[name](plain)
        for _ in range(3):
            ours.step()
            expected.step()
        for parameter, sharded in zip(plain, mixed, strict=True):
            assert torch.equal(sharded.local, parameter)
            for key, value in expected.state[parameter].items():
                found = ours.state[sharded][key]
                assert isinstance(found, ShardedTensor) == (value.shape == parameter.shape != ())
                assert torch.equal(getattr(found, "local", found), value)

    run_local(1, rank)


def test_groups_say_where_their_tensors_were() -> None:
    def rank() -> None:
        given = with_gradients(torch.float64, torch.float32)
        given = [given[0], given[-1], given[1]]
        groups = grouped("torch.optim.sgd", [given, [], [p.grad for p in given]])
        assert groups is not None
        cpu = torch.device("cpu")
        assert {kind: indices for kind, (_, indices) in groups.items()} == {
            (cpu, torch.float64): [0, 2],
            (cpu, torch.float32): [1],
        }
        (one,), none, (gradient,) = groups[cpu, torch.float32][0]
        assert one is given[1].local
        assert none == []
        assert gradient is given[1].grad.local
        # Whether a step may mix dtypes is for torch to say.
        assert grouped("torch.optim.sgd", [given, [p.detach().bfloat16() for p in given]]) is None

    run_local(1, rank)


def test_an_optimizer_of_somebody_else_groups_sharded_tensors() -> None:
    def rank() -> None:
        given = with_gradients()
        groups: Any = optim.Optimizer._group_tensors_by_device_and_dtype([given])
        ((lists, _),) = groups.values()
        assert all(a is b for a, b in zip(lists[0], given, strict=True))

    run_local(1, rank)


def test_parameters_that_are_plain_or_new_step_with_the_others() -> None:
    def rank() -> None:
        whole = nn.Parameter(torch.ones(3))
        given = [*with_gradients(), whole]
        optimizer = optim.SGD(given, lr=1.0, momentum=0.5, foreach=True)
        optimizer.step()  # the plain one has no gradient yet
        whole.grad = torch.ones(3)
        before = [given[0].local.clone(), whole.detach().clone()]
        optimizer.step()
        assert torch.equal(given[0].local, before[0] - 1.5)
        assert torch.equal(whole, before[1] - 1)
        assert isinstance(optimizer.state[given[0]]["momentum_buffer"], ShardedTensor)

    run_local(1, rank)


@pytest.mark.parametrize("fused", [True, False])
def test_state_that_does_not_belong_is_refused(fused: bool) -> None:
    def rank() -> None:
        given = with_gradients()
        other_cuts = parameters(random_tensors(), Whole())
        wrong: list[tuple[type, str, Callable[[Any, Any], Any]]] = [
            (RuntimeError, "dtype|scalar type", lambda state, _: state.bfloat16()),
            (NotImplementedError, "plain", lambda state, _: state.local),
            (UsageError, "cut", lambda _, other: torch.zeros_like(other)),
        ]
        optimizer = optim.AdamW(given, foreach=not fused, fused=fused)
        optimizer.step()
        for error, match, spoiled in wrong:
            kept = [optimizer.state[parameter]["exp_avg"] for parameter in given]
            for parameter, state, other in zip(given, kept, other_cuts, strict=True):
                optimizer.state[parameter]["exp_avg"] = spoiled(state, other)
            with pytest.raises(error, match=match):
                optimizer.step()
            for parameter, state in zip(given, kept, strict=True):
                optimizer.state[parameter]["exp_avg"] = state

    run_local(2, rank)


def test_data_of_another_dtype_changes_the_kind() -> None:
    def rank() -> None:
        (first, *_) = with_gradients()
        first.grad = None
        first.data = first.detach().double()
        assert first.kind == (first.local.device, torch.float64)
        assert (first.detach() > 0).kind[1] is torch.bool

    run_local(1, rank)

"""Everything that a step reads but the elements of tensors, as it was at one moment.

A captured step stands for the written one only while this is the same:

| | compared |
|---|---|
| data | structure, shapes, strides, dtypes, devices, which tensors are one or share memory |
| settings | grad mode, autocast, default dtype, determinism, precision, kernels |
| parameters | `requires_grad`, hooks |
| optimizer | members and numbers of its groups; learning rates are inputs |
| engine | what the setters of `fully_shard` and `replicate` set |
| Python | `Reads`: the tree of modules, modes, attributes, hooks, classes, closures, globals |

`StepTensors` compares which tensors the model and the optimizer hold, and in which memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch import autograd, optimizers, settings
from shoal.compile.step.reads import Reads
from shoal.compile.step.step_data import StepData
from shoal.ddp.grad_hooks import hooks_of
from shoal.ddp.replicated import replicas_of
from shoal.runtime.module_state import units_of

_NOT_NUMBERS = frozenset(
    {
        *("params", "lr"),  # compared by themselves
        *("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"),
    }
)
"""Keys of groups that are no constants of a graph; some are notes of schedulers."""

_members: Callable[[dict[str, Any]], list[Tensor]] = itemgetter("params")
_trains: Callable[[Tensor], bool] = attrgetter("requires_grad")
_options: Callable[[Any], Any] = attrgetter("options", "policy", "shards.num_recaptures")
_averaging: Callable[[Any], Any] = attrgetter(
    *("averages", "have_buffers_changed", "in_graph.wire", "in_graph.can_average")
)


class Fingerprint:
    """What a step read, to compare with what it would read now."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        data: StepData,
    ) -> None:
        self._data = data.described, data.structure
        self._settings = settings.GlobalSettings()
        self._named = dict(model.named_parameters())
        if isinstance(loss_fn, nn.Module):
            self._named.update(loss_fn.named_parameters("loss_fn"))
        self._parameters = list(self._named.values())
        self._trained = list(map(_trains, self._parameters))
        self._groups = _Groups(optimizer)
        self._hooks = _Hooks(self._parameters, optimizer)
        self._units, self._replicas = units_of(model), replicas_of(model)
        self._engine = self._engine_now()
        hooks = settings.hooks_of_all_modules()
        self.reads = Reads(
            {"": model, "loss_fn": loss_fn, "hooks of all modules": hooks}, optimizer
        )

    def matches(self, data: StepData) -> bool:
        """Whether a step with this data would read the same now."""
        return (data.described, data.structure) == self._data and self.matches_but_data()

    def matches_but_data(self) -> bool:
        """Whether a step would read the same now but for the data that it is given."""
        return next(self._changes(), None) is None

    def difference(self, data: StepData) -> str:
        """What is different now, in words."""
        if (data.described, data.structure) != self._data:
            return "the inputs have other shapes, strides, dtypes or values"
        return next(self._changes(), "tensors were put in other places")

    def _changes(self) -> Iterator[str]:
        """What is different now but for the data, in words. Runs in every step, to its end."""
        if (setting := self._settings.change()) is not None:
            yield f"the setting {setting} is another"
        trained = list(map(_trains, self._parameters))
        if trained != self._trained:
            pairs = zip(self._named, self._trained, trained, strict=True)
            name, before = next((name, before) for name, before, now in pairs if before != now)
            yield f"{name}.requires_grad was {before} and is {not before}"
        if not self._hooks.are_same():
            yield "hooks were put on parameters, or on the optimizer's step"
        if self._engine_now() != self._engine:
            yield "an option of fully_shard or replicate is another"
        if (change := self._groups.change() or self.reads.change()) is not None:
            yield change

    def _engine_now(self) -> list[Any]:
        return [*map(_options, self._units), *map(_averaging, self._replicas)]


class _Hooks:
    """Hooks that a captured step does not call: none of the user's, as was checked before."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._on_grads = list(map(autograd.grad_hooks, parameters))
        self._empty = list(map(hooks_of, parameters))
        self._on_step = optimizers.step_hooks(optimizer)
        self._on_step_before = list(map(dict, self._on_step))
        self._methods = optimizers.replaced_methods(optimizer)

    def are_same(self) -> bool:
        return (
            not any(map(autograd.tensor_hooks, self._parameters))
            and all(map(is_, map(autograd.grad_hooks, self._parameters), self._on_grads))
            and not any(self._empty)
            and self._on_step == self._on_step_before
            and optimizers.replaced_methods(self._optimizer) == self._methods
        )


class _Groups:
    """The groups of an optimizer, as they were at one moment."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = list(optimizer.param_groups)
        self._members = list(map(tuple, map(_members, self._groups)))
        self._numbers = list(map(_numbers, self._groups))
        self._sizes = list(map(len, self._groups))
        self._rates = list(map(_rate, self._groups))

    def change(self) -> str | None:
        """What is different now, in words; None if nothing is."""
        groups = self._optimizer.param_groups
        if not (
            _are_identical(groups, self._groups)
            and list(map(len, groups)) == self._sizes
            and all(map(_are_identical, map(_members, groups), self._members))
        ):
            return "the optimizer's groups have other members"
        if not _are_equal(list(map(_numbers, groups)), self._numbers):
            for number, before in enumerate(self._numbers):
                for key, old in before.items():
                    new = groups[number].get(key)
                    if not (old is new or _are_equal(old, new)):
                        return f"optimizer.param_groups[{number}][{key!r}] was {old} and is {new}"
            return "the optimizer's groups have other options"
        is_same = all(map(is_, map(_rate, groups), self._rates))
        return None if is_same else "a learning rate is another tensor"


def _are_identical(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group that are constants of a graph."""
    return {key: one for key, one in group.items() if key not in _NOT_NUMBERS}


def _rate(group: dict[str, Any]) -> Tensor | None:
    """A learning rate that is an input of a graph itself; None for numbers, which are copied."""
    rate = group.get("lr")
    return rate if isinstance(rate, Tensor) else None


def _are_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return False  # other tensors

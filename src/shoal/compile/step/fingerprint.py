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

from collections.abc import Callable, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from shoal._torch import autograd, optimizers, settings
from shoal.compile.step.batch import Batch
from shoal.compile.step.reads import Reads
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
        data: Batch,
    ) -> None:
        self._structure, self._described = data.structure, data.described
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

    def matches(self, data: Batch) -> bool:
        """Whether a step with this data would read the same now."""
        return (
            data.described == self._described
            and data.structure == self._structure
            and self.matches_but_data()
        )

    def matches_but_data(self) -> bool:
        """Whether a step would read the same now but for the data that it is given."""
        return (
            self._settings.change() is None
            and list(map(_trains, self._parameters)) == self._trained
            and self._hooks.are_same()
            and self._groups.are_same()
            and self._engine_now() == self._engine
            and self.reads.are_same()
        )

    def difference(self, data: Batch) -> str:
        """What is different now, in words."""
        if data.described != self._described or data.structure != self._structure:
            return "the inputs have other shapes, strides, dtypes or values"
        if (setting := self._settings.change()) is not None:
            return f"the setting {setting} is another"
        for (name, parameter), before in zip(self._named.items(), self._trained, strict=True):
            if parameter.requires_grad is not before:
                return f"{name}.requires_grad was {before} and is {not before}"
        if not self._hooks.are_same():
            return "hooks were put on parameters, or on the optimizer's step"
        if self._engine_now() != self._engine:
            return "an option of fully_shard or replicate is another"
        return self._groups.change() or self.reads.change() or "tensors were put in other places"

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
        self._members = [tuple(group["params"]) for group in self._groups]
        self._keys = [
            ("params", *(key for key in group if key not in _NOT_NUMBERS)) for group in self._groups
        ]
        self._getters = [itemgetter(*keys) for keys in self._keys]
        self._numbers = [get(group) for get, group in zip(self._getters, self._groups, strict=True)]
        self._sizes = list(map(len, self._groups))
        self._rates = [_rate(group) for group in self._groups]

    def are_same(self) -> bool:
        return self._have_same_members() and self._have_same_numbers()

    def change(self) -> str | None:
        """What is different now, in words; None if nothing is."""
        if not self._have_same_members():
            return "the optimizer's groups have other members"
        for number, (group, keys, before) in enumerate(
            zip(self._groups, self._keys, self._numbers, strict=True)
        ):
            for key, old in zip(keys[1:], before[1:] if keys[1:] else (), strict=True):
                if not (old is (new := group.get(key)) or _are_equal(old, new)):
                    return f"optimizer.param_groups[{number}][{key!r}] was {old} and is {new}"
        return None if self.are_same() else "a learning rate is another tensor"

    def _have_same_members(self) -> bool:
        groups = self._optimizer.param_groups
        return (
            len(groups) == len(self._groups)
            and all(map(is_, groups, self._groups))
            and list(map(len, groups)) == self._sizes
            and all(
                len(group["params"]) == len(members) and all(map(is_, group["params"], members))
                for group, members in zip(groups, self._members, strict=True)
            )
        )

    def _have_same_numbers(self) -> bool:
        pairs = zip(self._getters, self._groups, strict=True)
        return _are_equal([get(group) for get, group in pairs], self._numbers) and all(
            map(is_, map(_rate, self._groups), self._rates)
        )


def _rate(group: dict[str, Any]) -> Tensor | None:
    """A learning rate that is an input of a graph itself; None for numbers, which are copied."""
    rate = group.get("lr")
    return rate if isinstance(rate, Tensor) else None


def _are_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return False  # other tensors

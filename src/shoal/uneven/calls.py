"""Calls in a loop that ranks without inputs make too: of optimizers, scalers, schedulers, clipping.

They are told by number and name, with plain values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal._torch import clipping
from shoal.errors import UsageError
from shoal.runtime.context import Context

_METHODS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (torch.amp.GradScaler, ("unscale_", "step", "update")),
    (torch.optim.lr_scheduler.LRScheduler, ("step",)),
    (Optimizer, ("step",)),
    (nn.Module, ("clip_grad_norm_",)),
)
"""What is called on every rank, by the kind of the object."""


def methods_of(joined: object) -> tuple[str, ...]:
    """The methods of an object whose calls are mirrored."""
    for kind, names in _METHODS:
        if isinstance(joined, kind):
            return tuple(name for name in names if hasattr(joined, name))
    raise UsageError(
        "shoal.join takes sharded models, optimizers, gradient scalers and learning-rate "
        f"schedulers, got a {type(joined).__name__}"
    )


class MirroredCalls:
    """Writes calls on joined objects as plain values, and makes them again."""

    def __init__(self, objects: Sequence[object], contexts: Sequence[Context]) -> None:
        self._objects = objects
        units = [unit for context in contexts for unit in context.units]
        self._parameters = [p for unit in units for p in unit.shards.sharded]
        self._device = units[0].device

    def written(
        self, number: int, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A call, with the numbers that its optimizer would be set to by the loop."""
        where = f"{type(self._objects[number]).__name__}.{method}"
        groups = [self._written_groups(o) for o in self._objects if isinstance(o, Optimizer)]
        return {
            "kind": "call",
            "object": number,
            "method": method,
            "args": [self._written(value, where) for value in args],
            "kwargs": {name: self._written(value, where) for name, value in kwargs.items()},
            "groups": groups,
        }

    def _written(self, value: Any, where: str) -> Any:
        for number, known in enumerate(self._objects):
            if value is known:
                return {"object": number}
        plain = _plain(value)
        if plain is None and value is not None:
            raise NotImplementedError(
                f"shoal.join: {where} is given a {type(value).__name__}, which cannot be told to "
                "the ranks that have no more inputs; pass numbers, and objects that join was given"
            )
        return plain

    def _written_groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        return [
            {name: _plain(value) for name, value in group.items() if _plain(value) is not None}
            for group in optimizer.param_groups
        ]

    def make(self, call: Mapping[str, Any]) -> None:
        """Make a call that another rank has written."""
        optimizers = [one for one in self._objects if isinstance(one, Optimizer)]
        for optimizer, groups in zip(optimizers, call["groups"], strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                for name, value in values.items():
                    _set(group, name, value)
        target, method = self._objects[call["object"]], call["method"]
        if method not in methods_of(target):
            raise ValueError(f"expected one of {methods_of(target)}, got {method!r}")
        if isinstance(target, torch.amp.GradScaler):
            # It makes its scale when it first scales a loss; this rank may never have had one.
            target.scale(torch.zeros((), device=self._device))
        args = [self._read(value) for value in call["args"]]
        getattr(target, method)(*args, **{n: self._read(v) for n, v in call["kwargs"].items()})

    def _read(self, value: Any) -> Any:
        return self._objects[value["object"]] if isinstance(value, dict) else value

    def numbers_of(self, tensors: Iterable[Any], *, are_grads: bool) -> list[int]:
        """Which parameters these are, or the gradients of which; those that nobody shards not."""
        known = {
            id(parameter.grad if are_grads else parameter): number
            for number, parameter in enumerate(self._parameters)
        }
        return [known[id(tensor)] for tensor in tensors if id(tensor) in known]

    def norm_again(self, call: Mapping[str, Any]) -> Any:
        """The norm that another rank computes."""
        chosen = (self._parameters[number].grad for number in call["parameters"])
        grads = [grad for grad in chosen if grad is not None]
        return clipping.total_norm(grads, *call["args"])

    def clip_again(self, call: Mapping[str, Any], norm: Any) -> None:
        """Clip by a norm, as another rank does."""
        parameters = [self._parameters[number] for number in call["parameters"]]
        clipping.clip_with_norm(parameters, call["max_norm"], norm, call["foreach"])


def _plain(value: Any) -> Any:
    """A value as JSON has it; None for what has no such form."""
    if isinstance(value, torch.Tensor):
        return {"tensor": value.item()} if value.numel() == 1 else None
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and all(_plain(one) is not None for one in value):
        return [_plain(one) for one in value]
    return None


def _set(group: dict[str, Any], name: str, value: Any) -> None:
    """Set a number of a parameter group, in the tensor or tuple that it is in."""
    before = group.get(name)
    if isinstance(value, dict):
        value = value["tensor"]
    if isinstance(before, torch.Tensor):
        if before.item() != value:
            before.fill_(value)
    elif isinstance(before, tuple):
        group[name] = tuple(value)
    else:
        group[name] = value

"""Hooks on gradients that wait for the average.

A user's `register_post_accumulate_grad_hook` is there to use a gradient as soon as it is whole: to
step an optimizer in backward and free the gradient. On a replicated module a gradient is whole
when it is averaged; what autograd has accumulated is this rank's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from shoal._torch import autograd

GradHook: TypeAlias = Callable[[Tensor], None]

_OWN = -1
"""Where handles of hooks count from 0."""


class Listeners(OrderedDict[int, GradHook]):
    """Stands where torch keeps a parameter's hooks: autograd finds the engine's alone."""

    def __init__(self, own: GradHook, waiting: set[Listeners]) -> None:
        super().__init__()
        self._waiting = waiting
        self._others: dict[int, GradHook] = {}
        super().__setitem__(_OWN, own)

    def __setitem__(self, handle: int, hook: GradHook) -> None:
        self._others[handle] = hook
        self._waiting.add(self)

    def __contains__(self, handle: object) -> bool:
        return handle in self._others

    def __delitem__(self, handle: int) -> None:
        del self._others[handle]
        if not self._others:
            self._waiting.discard(self)

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def users(self) -> dict[int, GradHook]:
        """All but the engine's own; the dict itself, which changes with them."""
        return self._others

    def call(self, parameter: Tensor) -> None:
        """The gradient is averaged."""
        for hook in tuple(self._others.values()):
            hook(parameter)


def listen(parameter: nn.Parameter, own: GradHook, waiting: set[Listeners]) -> Listeners:
    """Have `own` called when a gradient is accumulated, and let all other hooks wait.

    `waiting` gets those that have anybody to call.
    """
    listeners = Listeners(own, waiting)
    for handle, hook in (autograd.grad_hooks(parameter) or {}).items():
        listeners[handle] = hook
    autograd.set_grad_hooks(parameter, listeners)
    return listeners


def hooks_of(parameter: nn.Parameter) -> dict[int, GradHook]:
    """The hooks on a parameter's gradient that are not `replicate`'s own."""
    hooks = autograd.grad_hooks(parameter)
    return hooks.users if isinstance(hooks, Listeners) else hooks or {}

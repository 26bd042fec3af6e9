"""Hooks on gradients that wait for the average.

A user's `register_post_accumulate_grad_hook` is there to use a gradient as soon as it is whole: to
step an optimizer in backward and free the gradient. On a replicated module a gradient is whole
when it is averaged; autograd has accumulated only this rank's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor, nn

from shoal._torch import autograd

GradHook: TypeAlias = Callable[[Tensor], None]

_ENGINE = -1
"""The handle of the engine's own hook; torch counts the handles of hooks from 0."""


class WaitingHooks(OrderedDict[int, GradHook]):
    """Stands where torch keeps a parameter's hooks, so that autograd calls the engine's alone.

    All other hooks are in `users`, and wait until `call`. `waiting` gets this object for as long as
    there are any.
    """

    def __init__(self, parameter: nn.Parameter, own: GradHook, waiting: set[WaitingHooks]) -> None:
        super().__init__()
        self._waiting = waiting
        self.users: dict[int, GradHook] = {}
        super().__setitem__(_ENGINE, own)
        for handle, hook in (autograd.grad_hooks(parameter) or {}).items():
            self[handle] = hook
        autograd.set_grad_hooks(parameter, self)

    def __setitem__(self, handle: int, hook: GradHook) -> None:
        self.users[handle] = hook
        self._waiting.add(self)

    def __contains__(self, handle: object) -> bool:
        return handle in self.users

    def __delitem__(self, handle: int) -> None:
        del self.users[handle]
        if not self.users:
            self._waiting.discard(self)

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType]

    def __eq__(self, other: object) -> bool:
        return self is other

    def call(self, parameter: Tensor) -> None:
        """Call the users' hooks: the gradient is averaged."""
        for hook in tuple(self.users.values()):
            hook(parameter)


def hooks_of(parameter: nn.Parameter) -> dict[int, GradHook]:
    """The hooks on a parameter's gradient that are not `replicate`'s own."""
    hooks = autograd.grad_hooks(parameter)
    return hooks.users if isinstance(hooks, WaitingHooks) else hooks or {}

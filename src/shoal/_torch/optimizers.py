"""Optimizers: how their steps group tensors, what stands around a step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, cast

import torch
from torch.optim import _muon


def offer_foreach(cls: type) -> None:
    """Let optimizers and gradient clipping choose multi-tensor operations for a tensor class."""
    for module in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        classes: list[type] = sys.modules[module]._foreach_supported_types
        if cls not in classes:
            classes.append(cls)


@contextmanager
def as_accelerated(device_type: str) -> Iterator[None]:
    """Let optimizers take fused and multi-tensor steps on a type of device, in a `with` block."""
    module: Any = sys.modules["torch.optim.optimizer"]
    names = ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices")
    before = {name: getattr(module, name) for name in names}

    def also(name: str) -> Callable[[], list[str]]:
        return lambda: [*before[name](), device_type]

    try:
        for name in names:
            setattr(module, name, also(name))
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def bare_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """An optimizer's step, as its class has it, without what stands around it for profilers."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a gradient scaler forget a step that was broken off: what it has unscaled, and found."""
    cast(Any, scaler)._per_optimizer_states.clear()


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a scheduler of torch's sets the rates of an optimizer."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def step_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Callable[..., Any]]]:
    """The dicts that hold hooks on an optimizer's step: its own, and those of all optimizers."""
    private: Any = optimizer
    module: Any = sys.modules["torch.optim.optimizer"]
    return [
        *(private._optimizer_step_pre_hooks, private._optimizer_step_post_hooks),
        *(module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks),
    ]


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let no hook hear of an optimizer's steps, in a `with` block."""
    before = [(hooks, dict(hooks)) for hooks in step_hooks(optimizer)]
    for hooks, _ in before:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, held in before:
            hooks.update(held)


def replaced_methods(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The methods that one optimizer has in the place of its class's."""
    kind = type(optimizer)
    held = vars(optimizer).items()
    return {name: one for name, one in held if callable(one) and hasattr(kind, name)}


def twin_of(optimizer: torch.optim.Optimizer) -> Any:
    """Another optimizer with the same attributes, and its class's own methods."""
    twin = object.__new__(type(optimizer))  # `copy.copy` leaves out attributes of subclasses
    replaced = replaced_methods(optimizer)
    vars(twin).update((k, one) for k, one in vars(optimizer).items() if k not in replaced)
    return twin


def around_step(optimizer: torch.optim.Optimizer) -> str | None:
    """What a user put around an optimizer's step, beside schedulers; None if nothing."""
    hooks = chain.from_iterable(hooks.values() for hooks in step_hooks(optimizer))
    methods = replaced_methods(optimizer).values()
    for one in chain(hooks, (m for m in methods if not hasattr(m, "_wrapped_by_lr_sched"))):
        if not (getattr(one, "__module__", None) or "").startswith("shoal."):
            return f"{getattr(one, '__qualname__', one)!r}, put around the optimizer's step"
    return None


def count_update(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know that an optimizer has updated its parameters, though not by `step`."""
    cast(Any, optimizer)._opt_called = True


def group_for_optimizers(group: Callable[[str, list[list[Any]]], dict[Any, Any] | None]) -> None:
    """Offer the lists that an optimizer groups by device and dtype to `group` first.

    It gets the name of the optimizer's module, and the lists. None leaves them to torch, and so
    does a step that is being compiled.
    """
    optimizer = torch.optim.Optimizer
    by_torch: Callable[..., Any] = optimizer._group_tensors_by_device_and_dtype

    def grouped(tensorlistlist: list[list[Any]], with_indices: bool = False) -> Any:
        if not torch.compiler.is_compiling():
            module = sys._getframe(1).f_globals["__name__"]
            groups = group(module, tensorlistlist)
            if groups is not None:
                return groups
        return by_torch(tensorlistlist, with_indices)

    cast(Any, optimizer)._group_tensors_by_device_and_dtype = staticmethod(grouped)


orthogonalised: Callable[..., torch.Tensor] = _muon._zeropower_via_newtonschulz
"""What Muon makes of a matrix, in bfloat16; it takes coefficients, the number of steps, and eps."""

muon_lr: Callable[[float, str | None, torch.Size], float] = _muon._adjust_lr
"""Muon's learning rate for a matrix of some shape."""

"""What a wrapper leaves alone: modules, or parameters, that the user names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from shoal.runtime.module_state import state_of


def ignored_of(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
) -> tuple[set[nn.Module], set[nn.Parameter]]:
    """The modules to leave alone with all below them, and the parameters to leave alone."""
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "Cannot pass both ignored_modules and ignored_states at the same time: pass "
            "ignored_states alone"
        )
    states: list[Any] = list(ignored_states or ())
    try:
        roots: list[Any] = list(ignored_modules or ())
    except TypeError as error:
        raise TypeError(
            "`ignored_modules` should be an iterable of `torch.nn.Module`s but got "
            f"{type(ignored_modules)}"
        ) from error
    kinds = sorted({type(state) for state in (*states, *roots)}, key=repr)
    parameters: set[nn.Parameter] = set()
    if states and all(isinstance(state, nn.Parameter) for state in states):
        parameters.update(states)
    elif states and all(isinstance(state, nn.Module) for state in states):
        roots = states
    elif states:
        raise ValueError(
            "ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
            f"{kinds}"
        )
    for root in roots:
        if not isinstance(root, nn.Module):
            raise ValueError(
                f"ignored_modules expects nn.Module list elements but got types {kinds}"
            )
        if state_of(root) is not None:
            raise ValueError("`ignored_modules` should not include FSDP modules")
    modules = {child for root in roots for child in root.modules() if state_of(child) is None}
    if module in modules:
        warnings.warn(
            "Trying to ignore the top-level module passed into the FSDP constructor itself will "
            f"result in all parameters being ignored and is not well-supported: {module}",
            stacklevel=3,
        )
    for child in modules:
        parameters.update(p for p in child._parameters.values() if p is not None)
    # What a wrapper inside leaves alone, this one does too.
    for child in module.modules():
        inner = getattr(child, "_ignored_params", None)
        if state_of(child) is not None and inner:
            parameters.update(inner)
    return modules, parameters

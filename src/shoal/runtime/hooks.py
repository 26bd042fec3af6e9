"""Every hook the engine registers, and the per-module state they read.

forward pre-hook    → full parameters, cast inputs
forward hook        → hooks on the outputs, free
output tensor hook  → full parameters again, when backward reaches the module
parameter hook      → count gradients, reduce with the last one
state-dict pre-hook → shards
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from shoal import _torch
from shoal.runtime.context import Context
from shoal.runtime.phase import Phase
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.runtime.unit import Pass, Unit

_STATE = "_shoal_state"


class ModuleState:
    """What `fully_shard` knows of one module."""

    def __init__(
        self,
        module: nn.Module,
        unit: Unit | None,
        policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
    ) -> None:
        self.unit = unit
        self.policy = policy
        self.context: Context | None = None
        self.is_root = False
        self.run = Pass(reaches_inputs=False)
        self._reshard_after_forward = reshard_after_forward
        setattr(module, _STATE, self)

    @property
    def reshard_after_forward(self) -> bool:
        """By default all but the root free their parameters: the root's backward comes first."""
        if self._reshard_after_forward is None:
            return not self.is_root
        return self._reshard_after_forward


def state_of(module: nn.Module) -> ModuleState | None:
    """The state that `fully_shard` gave this very module, if it did."""
    return module.__dict__.get(_STATE)


def context_of(module: nn.Module, state: ModuleState) -> Context:
    """The context of the model that a module belongs to; the first to run becomes its root."""
    if state.context is None:
        units: list[Unit] = []
        for name, child in module.named_modules():
            below = state_of(child)
            if below is None:
                continue
            below.is_root = below is state
            if below.unit is not None:
                below.unit.name = name or "root"
                units.append(below.unit)
        context = Context(units)
        for child in module.modules():
            below = state_of(child)
            if below is not None:
                below.context = context
    assert state.context is not None
    return state.context


def register_hooks(module: nn.Module, state: ModuleState) -> None:
    """Connect a module to the engine."""

    def pre_forward(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        context = context_of(module, state)
        if state.is_root:
            context.begin_forward()
        if state.policy.cast_forward_inputs:
            args, kwargs = _cast((args, kwargs), state.policy.param_dtype)
        unit = state.unit
        if unit is not None:
            context.enter_forward(unit)
            if unit.phase is Phase.FORWARD:
                inputs = _differentiable((args, kwargs))
                state.run = run = Pass(reaches_inputs=bool(inputs))
                handle = _on_grads(inputs, lambda: context.leave_backward(unit, run))
                if handle is not None and any(tensor.is_leaf for tensor in inputs):
                    context.leaf_hooks.append(handle)
        return args, kwargs

    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        context = context_of(module, state)
        outputs = _differentiable(output)
        unit = state.unit
        if unit is not None and unit.phase is Phase.FORWARD:
            run = state.run
            for tensor in outputs:
                tensor.register_hook(lambda _: context.enter_backward(unit, run))
            context.leave_forward(unit, reshard=state.reshard_after_forward or not outputs)
        if state.is_root:
            context.end_forward(expects_backward=bool(outputs))
        return _cast(output, state.policy.output_dtype)

    def pre_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if state.unit is not None:
            state.unit.reshard()

    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward)
    module.register_state_dict_pre_hook(pre_state_dict)
    if state.unit is not None:
        state.unit.on_grad(lambda unit: context_of(module, state).gradient_arrived(unit))


def _differentiable(values: Any) -> list[torch.Tensor]:
    """The tensors of nested containers that a backward can reach."""
    if not torch.is_grad_enabled():
        return []
    return [
        leaf
        for leaf in _torch.tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def _on_grads(tensors: list[torch.Tensor], hook: Callable[[], None]) -> RemovableHandle | None:
    """Call `hook` when a backward has computed the gradients of all these tensors."""
    if not tensors:
        return None
    if len(tensors) == 1:
        return tensors[0].register_hook(lambda _: hook())
    return register_multi_grad_hook(tensors, lambda _: hook())


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors of nested containers; give the rest through."""
    if dtype is None:
        return values

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != dtype:
            return leaf.to(dtype)
        return leaf

    return _torch.tree_map(cast, values)

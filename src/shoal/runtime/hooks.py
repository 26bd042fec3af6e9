"""Every hook the engine registers, and the per-module state they read.

forward pre-hook    → full parameters, cast inputs
forward hook        → hooks on the outputs, free
output tensor hook  → full parameters again, when backward reaches the module
parameter hook      → count gradients, reduce with the last one
state-dict pre-hook → shards
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from shoal import _torch
from shoal.errors import InvariantError
from shoal.runtime.context import Context
from shoal.runtime.phase import Phase
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.runtime.reach import Reach
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
        self.run: Pass = Pass(reaches_inputs=False, version=())
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
        states = [(name, state_of(child)) for name, child in module.named_modules()]
        found = [(name, below) for name, below in states if below is not None]
        for name, below in found:
            below.is_root = below is state
            if below.unit is not None:
                below.unit.name = name or "root"
        units = [below.unit for _, below in found if below.unit is not None]
        context = Context(units, root=state.unit)
        for _, below in found:
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
        if state.unit is not None:
            context.enter_forward(state.unit)
            if state.unit.phase is Phase.FORWARD:
                state.run = _begin_pass(state, state.unit, Reach.of((args, kwargs)))
        return args, kwargs

    def post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        context = context_of(module, state)
        reach = Reach.of(output)
        # What cannot be looked into may hold a loss: better to hold the unit in vain.
        is_expected = bool(reach.differentiable) or (reach.is_opaque and torch.is_grad_enabled())
        unit = state.unit
        if unit is not None and unit.phase is Phase.FORWARD:
            _hook_outputs(state, unit, reach)
            reshard = state.reshard_after_forward and bool(reach.differentiable)
            context.leave_forward(unit, reshard=reshard or not is_expected)
        if state.is_root:
            context.end_forward(expects_backward=is_expected)
        return _cast(output, state.policy.output_dtype)

    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward)
    if state.unit is not None:
        _register_parameter_hooks(state, state.unit)


def _begin_pass(state: ModuleState, unit: Unit, inputs: Reach) -> Pass:
    """Arrange to be told when backward has left the module."""
    tensors = inputs.differentiable
    # With leaves alone a pass counts as open until the end of backward: a leaf's own hook would
    # come before nodes that do not depend on it, and pile up on a tensor that outlives the step.
    run = Pass(reaches_inputs=bool(tensors) or inputs.has_leaf, version=unit.version)

    def leave(_: object) -> None:
        if state.context is not None:
            state.context.leave_backward(unit, run)

    if len(tensors) == 1:
        tensors[0].register_hook(leave)
    elif tensors:
        register_multi_grad_hook(tensors, leave)
    return run


def _hook_outputs(state: ModuleState, unit: Unit, outputs: Reach) -> None:
    """Arrange to be told when backward reaches the module."""
    run = state.run

    def enter(_: object) -> None:
        if state.context is not None:
            state.context.enter_backward(unit, run)

    for tensor in outputs.tensors:
        if unit.holds(tensor):
            raise InvariantError(
                f"unit {unit.name!r} returned one of its parameters or a view of one, whose memory "
                "is freed with the unit. Return a copy (.clone()), or use the parameter inside."
            )
    for tensor in outputs.differentiable:
        tensor.register_hook(enter)


def _register_parameter_hooks(state: ModuleState, unit: Unit) -> None:
    """Count gradients, and show state dicts the shards, never gathered parameters."""

    def count(unit: Unit) -> None:
        if state.context is not None:
            state.context.gradient_arrived(unit)

    def reshard(*_: object) -> None:
        unit.reshard()

    unit.on_grad(count)
    for module in {home.module for member in unit.members for home in member.homes}:
        module.register_state_dict_pre_hook(reshard)
        module.register_load_state_dict_pre_hook(reshard)


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors of nested containers; give the rest through."""
    if dtype is None:
        return values

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dtype != dtype:
            return leaf.to(dtype)
        return leaf

    return _torch.tree_map(cast, values)

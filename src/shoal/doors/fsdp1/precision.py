"""Mixed precision by the wrapper's rules; full precision in evaluations."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from shoal.doors.fsdp1.wrapper import Wrapper, wrappers_below
from shoal.runtime.module_state import state_of
from shoal.runtime.policy import MixedPrecisionPolicy
from shoal.runtime.unit import Unit

FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
"""The environment variable that asks for full precision in evaluations, if it is 1."""


def policy_of(precision: MixedPrecision) -> MixedPrecisionPolicy:
    """The engine's policy for a wrapper's precision; the root's inputs are cast apart."""
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype,
        cast_forward_inputs=precision.cast_forward_inputs,
    )


def keep_low_grads(unit: Unit, precision: MixedPrecision) -> None:
    """Let gradients have the dtype that they were computed in, beside parameters of a wider one.

    Without sharding that is the dtype of the reduction, as torch has it.
    """
    is_whole = unit.transport is None
    dtype = precision.reduce_dtype if is_whole and precision.reduce_dtype else precision.param_dtype
    if not precision.keep_low_precision_grads or dtype is None:
        return

    def narrow(parameter: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.dtype is not dtype:
            # Past the check that a gradient has its parameter's dtype.
            parameter.grad.data = parameter.grad.to(dtype)

    for parameter in unit.sharded_parameters():
        parameter.register_post_accumulate_grad_hook(narrow)


class Buffers:
    """The floating-point buffers of one wrapper, which are cast when the model first runs."""

    def __init__(self, modules: Iterator[nn.Module], dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._places = [
            (module, name, buffer.dtype)
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        ]

    def cast(self) -> None:
        """Give them the dtype of compute, if one was asked for."""
        if self._dtype is None:
            return
        for module, name, _ in self._places:
            self._set(module, name, self._dtype)

    def restore(self) -> None:
        """Give them their own dtypes again."""
        for module, name, dtype in self._places:
            self._set(module, name, dtype)

    def original_dtypes(self, root: nn.Module) -> dict[str, torch.dtype]:
        """The dtypes that they have of their own, by their names below a module."""
        names = {child: name for name, child in root.named_modules()}
        return {f"{names[module]}.{name}": dtype for module, name, dtype in self._places}

    @staticmethod
    def _set(module: nn.Module, name: str, dtype: torch.dtype) -> None:
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.dtype is not dtype:
            module._buffers[name] = buffer.to(dtype)


def follow_modes(root: Wrapper) -> None:
    """Let each wrapper compute in its own precision in training, and in the parameters' in eval.

    All at once and before any runs, because a unit is gathered before its module is called.
    """
    for one in wrappers_below(root):
        state = state_of(one)
        assert state is not None
        if one._is_in_full_precision is not one.training:
            continue
        one._is_in_full_precision = not one.training
        policy = policy_of(one.mixed_precision) if one.training else MixedPrecisionPolicy()
        state.policy = policy
        if one._unit is not None:
            one._unit.compute_by(policy)
        if one.training:
            one._buffers_cast.cast()
        else:
            one._buffers_cast.restore()

"""Communication hooks: functions of the user that reduce gradients in the engine's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from shoal._torch import wrapping
from shoal.comm import observer
from shoal.comm.calls import Reduction
from shoal.comm.pending import Pending
from shoal.comm.transport import Transport
from shoal.doors.fsdp1.root import ready
from shoal.doors.fsdp1.strategy import HYBRID
from shoal.doors.fsdp1.wrapper import Wrapper, wrappers_below
from shoal.runtime.unit import Unit

Hook = Callable[..., Any]
"""Takes its state and a full gradient; where it is sharded, also the tensor for this rank's
piece of the result."""


class CommHooks(Wrapper):
    """The method of the wrapper that takes a hook."""

    _comm_hook: Hook | None = None
    _comm_hook_state: object = None

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook` reduce the gradients of all units, division included.

        It is called as `hook(state, gradient, output)`, and without sharding as
        `hook(state, gradient)` to change the gradient in place. Both are flat.
        """
        if not ready(self).is_root:
            raise AssertionError("register_comm_hook can only be called on a root instance.")
        if not callable(hook):
            raise ValueError(f"The communication hook must be callable but got {hook}")
        wrappers = wrappers_below(self)
        for one in wrappers:
            if one.sharding_strategy in HYBRID:
                raise AssertionError(
                    "Communication hook is not supported for hybrid strategies: "
                    f"{one.sharding_strategy}"
                )
            if getattr(one, "_comm_hook", None) is not None:
                raise AssertionError("A communication hook is already registered")
            if one._have_run:
                raise AssertionError(
                    "A communication hook must be registered before the first forward, but this "
                    "model already ran: gradients of some steps would be reduced without it"
                )
        for one in wrappers:
            assert isinstance(one, CommHooks)
            one._comm_hook, one._comm_hook_state = hook, state
            if one._unit is not None:
                _reduce_by(one._unit, hook, state)


def _reduce_by(unit: Unit, hook: Hook, state: object) -> None:
    if unit.device.type == "cpu" and hook in _COMPRESSED:
        hook = partial(_compress, _COMPRESSED[hook])
    # A hook divides by itself.
    options = replace(unit.options, divide_factor=1.0)
    if unit.replicas is not None:
        unit.replicas = _HookedReplicas(unit.replicas.group, hook, state)
    else:
        options = replace(options, reduce_scatter=_HookedReduceScatter(hook, state))
    unit.options = options


def _compress(
    dtype: torch.dtype,
    state: wrapping.default_hooks.LowPrecisionState,
    grad: torch.Tensor,
    *output: torch.Tensor,
) -> None:
    """Do as torch's compression hooks, but without streams, which the CPU has none of."""
    hooks = wrapping.default_hooks
    for tensor in (grad, *output):
        tensor.data = tensor.data.to(dtype)
    (hooks.reduce_scatter_hook if output else hooks.allreduce_hook)(state, grad, *output)
    result = output[0] if output else grad
    result.data = result.data.to(state.parameter_type)


_COMPRESSED: dict[Hook, torch.dtype] = {
    wrapping.default_hooks.fp16_compress_hook: torch.float16,
    wrapping.default_hooks.bf16_compress_hook: torch.bfloat16,
}


def _hand_over(*tensors: torch.Tensor) -> None:
    """Let a hook put other memory into tensors, as the compressing ones do.

    What they have now was allocated for compute, which may get it for something else as soon as
    nobody holds it. The stream of the hook still reads it then.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(torch.get_device_module(tensor.device).current_stream())


class _HookedReduceScatter:
    """A reduce-scatter that is a hook."""

    def __init__(self, hook: Hook, state: object) -> None:
        self._hook, self._state = hook, state

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Ordinary memory, since hooks may put other memory into the tensor; padding is zero."""
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        _hand_over(input_tensor, output_tensor)
        self._hook(self._state, input_tensor, output_tensor)
        return None


class _HookedReplicas(Transport):
    """The replicas of a unit, whose all-reduce is a hook."""

    __slots__ = ("_hook", "_state")

    def __init__(self, group: dist.ProcessGroup, hook: Hook, state: object) -> None:
        super().__init__(group)
        self._hook, self._state = hook, state

    def all_reduce(
        self, tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, *, reason: str = "all-reduce"
    ) -> Pending:
        """See `Transport.all_reduce`."""
        _hand_over(tensor)
        launched = observer.launching(reason, self.group, tensor)
        self._hook(self._state, tensor)
        return Pending(tensor, None, reason, launched=launched)

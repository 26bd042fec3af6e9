"""Whole parameters for as long as a block: to look at them, to change them, to save them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from shoal._torch import wrapping
from shoal.doors.fsdp1.parameter_names import lenders
from shoal.doors.fsdp1.unit import WrappedUnit
from shoal.doors.fsdp1.wrapper import Wrapper, wrappers_below
from shoal.layout.buffer import full_tensors, shard_of, shard_views
from shoal.layout.strides import with_strides
from shoal.runtime.fsdp_module import UnshardHandle
from shoal.runtime.module_state import state_of
from shoal.runtime.parameter_wrapping import bytes_of
from shoal.sharding_wrapper import PREFIX
from shoal.step.phase import COMPUTING

_Grads = Sequence[torch.Tensor | None]
_STATES = wrapping.TrainingState
_CPU = torch.device("cpu")


class Summoning(Wrapper):
    """The methods of the wrapper that show whole parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._is_summoned = False
        """Whether the modules have whole parameters, of which the engine knows nothing."""

    @property
    def training_state(self) -> wrapping.TrainingState:
        """The state of the wrapper, in torch's terms."""
        if self._is_summoned:
            return _STATES.SUMMON_FULL_PARAMS
        computes = self._unit is not None and self._unit.phase in COMPUTING
        return _STATES.FORWARD_BACKWARD if computes else _STATES.IDLE

    def _assert_state(self, state: wrapping.TrainingState | list[wrapping.TrainingState]) -> None:
        """Refuse what a wrapper cannot do now; under torch's name, whose own helpers call it."""
        self._clear_broken_backward()
        allowed = state if isinstance(state, list) else [state]
        if self.training_state not in allowed:
            raise ValueError(
                f"expected to be in states {allowed} but current state is "
                f"{self.training_state}: call this outside of forward, backward and "
                "summon_full_params"
            )

    def _clear_broken_backward(self) -> None:
        """A backward that raised is over: its wrappers compute no more."""
        state = state_of(self)
        if state is not None and state.context is not None:
            state.context.clear_broken_backward()

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show whole parameters, in the dtype that the optimizer sees, until the block ends.

        The parameters are the same objects as outside, or the original ones inside the flat
        parameter. What the block writes to them is kept with `writeback`; every rank must then
        write the same. With `rank0_only`, the other ranks see what they see outside.
        """
        found = wrappers_below(module) if recurse else [module]
        wrappers = [one for one in found if isinstance(one, Summoning)]
        with ExitStack() as stack:
            for wrapper in wrappers:
                wrapper._check_summon(writeback, rank0_only, offload_to_cpu, with_grads)
            for wrapper in wrappers:
                stack.enter_context(
                    shown_whole(
                        wrapper,
                        writeback=writeback,
                        is_shown=not rank0_only or wrapper.rank == 0,
                        offload_to_cpu=offload_to_cpu,
                        with_grads=with_grads,
                    )
                )
            yield

    def _check_summon(
        self, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
    ) -> None:
        if with_grads and (offload_to_cpu or not self._use_orig_params):
            raise NotImplementedError(
                f"with_grads={with_grads}, use_orig_params={self._use_orig_params}, "
                f"offload_to_cpu={offload_to_cpu} is not supported yet"
            )
        if offload_to_cpu and self._unit is not None and self._unit.transport is None:
            raise NotImplementedError("offload_to_cpu=True and NO_SHARD is not supported yet")
        if writeback and rank0_only:
            raise NotImplementedError(
                "writeback=True and rank0_only=True is not supported yet: the other ranks have "
                "nothing to write; pass writeback=False"
            )
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "offload_to_cpu=True and rank0_only=False copies the whole parameters to the "
                "host's memory once for each rank on it: pass rank0_only=True if one is enough",
                stacklevel=4,
            )
        self._clear_broken_backward()
        if self.training_state is _STATES.FORWARD_BACKWARD:
            raise AssertionError(
                "Cannot manually unshard parameters during forward/backward: summon_full_params "
                "begins and ends outside of both"
            )
        if self.training_state is _STATES.SUMMON_FULL_PARAMS:
            raise AssertionError(
                "Cannot manually unshard parameters when already unsharding parameters"
            )

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` on all modules inside, which have their whole parameters then."""
        self._assert_state(_STATES.IDLE)
        with shown_whole(self, writeback=True):
            return super().apply(fn)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """See `nn.Module`; names are as in the original model while parameters are whole."""
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield (name.replace(PREFIX, "") if self._is_summoned else name), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """See `nn.Module`; names are as in the original model while parameters are whole."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (name.replace(PREFIX, "") if self._is_summoned else name), buffer

    def _unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this wrapper's parameters before its forward asks for them."""
        units = () if self._unit is None else (self._unit,)
        for unit in units:
            unit.prepare_alone()
            unit.prefetch()
        handle = UnshardHandle(units)
        if async_op:
            return handle
        handle.wait()
        return None

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Do nothing: torch calls it between a step and `_unshard`, and here each gather waits."""


@contextmanager
def shown_whole(
    wrapper: Summoning,
    *,
    writeback: bool = False,
    is_shown: bool = True,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
    in_place: bool = False,
    is_alone: bool = False,
) -> Iterator[None]:
    """Let the modules of one wrapper have whole parameters; collective.

    They are where the unit computes, on the host if they are offloaded there, or with `in_place`,
    if every rank holds them whole, where it does. The engine is not told: what it gathers has the
    dtype of compute, and belongs to steps. So have wrappers whose parameters it uses too (tied
    weights), unless it `is_alone`.
    """
    unit = wrapper._unit
    if wrapper._is_summoned:
        yield
        return
    with ExitStack() as stack:
        for lender in () if is_alone else lenders(wrapper):
            assert isinstance(lender, Summoning)
            stack.enter_context(
                shown_whole(
                    lender,
                    writeback=writeback,
                    is_shown=is_shown,
                    offload_to_cpu=offload_to_cpu,
                    with_grads=with_grads,
                    in_place=in_place,
                )
            )
        if unit is not None:
            # A rank that holds everything shows its own memory: writing to it is for good.
            writeback |= unit.size == 1 and not wrapper.cpu_offload.offload_params
            device = _CPU if offload_to_cpu else None if in_place else unit.device
            stack.enter_context(_whole(wrapper, unit, writeback, is_shown, device, with_grads))
        wrapper._is_summoned = True
        try:
            yield
        finally:
            wrapper._is_summoned = False


@contextmanager
def _whole(
    wrapper: Wrapper,
    unit: WrappedUnit,
    writeback: bool,
    is_shown: bool,
    device: torch.device | None,
    with_grads: bool,
) -> Iterator[None]:
    if unit.phase in COMPUTING:
        raise AssertionError(
            f"the parameters of {unit.name!r} are in use by its {unit.phase}: take state dicts and "
            "whole parameters outside of forward and backward"
        )
    unit.reshard()
    unit.shards.follow()
    packing, shard = unit.shards.packing, unit.shards.buffer
    if wrapper.cpu_offload.offload_params and not unit.offloads:
        shard = shard.clone()  # as where the shards are elsewhere than the compute
    grads = _whole_grads(unit) if with_grads else None
    reason = f"the whole parameters of {unit.name!r}"
    whole = (
        full_tensors(packing, shard) if device is None else unit.gathered(packing, shard, reason)
    )
    if not is_shown:
        yield
        return
    parameters = unit.sharded_parameters()
    local = [parameter.data for parameter in parameters]
    local_grads = [parameter.grad for parameter in parameters]
    for member, parameter, tensor in zip(unit.shards.members, parameters, whole, strict=True):
        tensor = with_strides(tensor, member.strides)
        parameter.data = data = tensor if device is None else tensor.to(device)
        full = member.wrapping.full(data)
        if full is not data:  # tensor parallelism has distributed it
            member.register(nn.Parameter(full, parameter.requires_grad))
    if grads is not None:
        _set_grads(parameters, grads)
    flat = wrapper._flat_members
    try:
        with nullcontext() if flat is None else flat.as_parameters(parameters[0]):
            yield
    finally:
        # `load_state_dict(assign=True)` puts others in their places.
        found = [m.places[0][0].get(m.places[0][1]) for m in unit.shards.members]
        whole = [
            bytes_of((own if other is None else other).data)
            for own, other in zip(parameters, found, strict=True)
        ]
        if grads is not None:
            grads = [parameter.grad for parameter in parameters]
            _set_grads(parameters, [None] * len(grads))
        for parameter, tensor in zip(parameters, local, strict=True):
            parameter.data = tensor
        unit.shards.register()
        if writeback:
            _write(parameters, _pieces(unit, whole))
        if grads is not None:
            _set_grads(parameters, _sharded_grads(unit, grads) if writeback else local_grads)


@torch.no_grad()
def _write(parameters: Sequence[nn.Parameter], pieces: Sequence[torch.Tensor]) -> None:
    """Change what has changed: a backward that is still to come refuses other parameters."""
    for parameter, piece in zip(parameters, pieces, strict=True):
        new = piece.view_as(parameter).to(parameter.device)  # shards may be offloaded
        if not torch.equal(parameter, new):
            parameter.copy_(new)


def _set_grads(parameters: Sequence[nn.Parameter], grads: _Grads) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def _whole_grads(unit: WrappedUnit) -> _Grads:
    """The whole gradients of a unit; None where no rank has a piece of one. Collective."""
    packing, buffer = unit.shards.packing, torch.zeros_like(unit.shards.buffer)
    local = [parameter.grad for parameter in unit.sharded_parameters()]
    for piece, grad in zip(shard_views(packing, unit.rank, buffer), local, strict=True):
        if grad is not None:
            piece.copy_(grad.view_as(piece))
    exists = torch.tensor([g is not None for g in local], dtype=torch.int32).to(unit.device)
    if unit.transport is not None:
        unit.transport.all_reduce(exists, dist.ReduceOp.MAX, reason="who has gradients").wait()
    whole = unit.gathered(packing, buffer, f"the whole gradients of {unit.name!r}")
    return [g if e else None for g, e in zip(whole, exists.tolist(), strict=True)]


def _sharded_grads(unit: WrappedUnit, whole: _Grads) -> _Grads:
    """This rank's pieces of whole gradients, as the parameters hold them."""
    filled = [
        torch.zeros(param.shape, dtype=param.dtype, device=unit.device) if grad is None else grad
        for param, grad in zip(unit.shards.packing.params, whole, strict=True)
    ]
    return [
        None
        if grad is None
        else member.wrapping.grad(member.sharded, piece.to(member.sharded.device, copy=True))
        for grad, member, piece in zip(
            whole, unit.shards.members, _pieces(unit, filled), strict=True
        )
    ]


def _pieces(unit: WrappedUnit, whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's elements of whole tensors."""
    packing = unit.shards.packing
    cast = [tensor.to(param.dtype) for tensor, param in zip(whole, packing.params, strict=True)]
    return shard_views(packing, unit.rank, shard_of(packing, unit.rank, cast))

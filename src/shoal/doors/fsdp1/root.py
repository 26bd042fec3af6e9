"""The root of a tree of wrappers, and the order in which its wrappers run.

The root is the wrapper that runs or is asked first, with everything inside of it. Ranks must run
wrappers in the same order, because a gather is a collective:

| when | compared | if it differs |
|---|---|---|
| a wrapper's first forward | with the other ranks, through the store | raises on all ranks |
| later, with `TORCH_DISTRIBUTED_DEBUG=DETAIL` | with this rank's first iteration | warns once |
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from shoal._torch import autograd, dynamo
from shoal.doors.fsdp1.precision import follow_modes
from shoal.doors.fsdp1.wrapper import Wrapper, wrappers_below
from shoal.runtime.module_state import ModuleState, context_of, state_of
from shoal.runtime.rank_guard import check_order_agrees
from shoal.runtime.unit import Unit

_IN_FIRST_FORWARD = timedelta(minutes=5)
_LATER = timedelta(minutes=1)
"""How long ranks wait for one another. They were together before a later forward."""
_IN_BACKWARD = "_in_backward_optimizers"
"""The attribute that torch's `_apply_optimizer_in_backward` puts on parameters."""
_STEPS = "_shoal_steps_in_backward"
_HOMOGENEOUS = ("_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval")


class ForwardOrder:
    """The units of one model in the order of its first training forward."""

    def __init__(self) -> None:
        self.is_watched = dist.get_debug_level() == dist.DebugLevel.DETAIL
        """Whether every forward is compared with the first. Nothing is gathered ahead then: a rank
        that goes another way communicates what it says, and not what it went past."""
        self._first: list[Unit] = []
        self._position = 0
        self._num_forwards = self._num_trained = 0
        self._has_warned = False

    def begin(self, *, trains: bool) -> None:
        """The model's forward begins."""
        self._num_forwards += 1
        self._num_trained += trains
        self._position = 0

    def enter(self, unit: Unit, *, is_new: bool, trains: bool) -> None:
        """A unit is about to run, perhaps for the first time."""
        is_first = self._num_forwards <= 1
        if is_new and (is_first or not self.is_watched):
            check_order_agrees(unit, _IN_FIRST_FORWARD if is_first else _LATER)
        if self.is_watched and trains:
            self._compare(unit)

    def _compare(self, unit: Unit) -> None:
        if self._num_trained <= 1:
            self._first.append(unit)
            return
        expected = self._first[self._position : self._position + 1]
        self._position += 1
        if expected == [unit] or self._has_warned:
            return
        self._has_warned = True
        name = f"unit {expected[0].name!r}" if expected else "the end of the forward"
        warnings.warn(
            f"Forward order differs from that of the first iteration on rank {dist.get_rank()}. "
            "Collectives are unchecked and may give incorrect results or hang: expected "
            f"{name}, got unit {unit.name!r}. Let every rank run the same modules in one order.",
            stacklevel=2,
        )


@dynamo.unwrapped_by_dynamo
def ready(wrapper: Wrapper) -> ModuleState:
    """The state of a wrapper that belongs to a model; without one it becomes the root of its own.

    Collective in that case: the ranks compare their models.
    """
    state = state_of(wrapper)
    assert state is not None
    if state.context is None:
        _check_tree(wrapper)
        context_of(wrapper, state)
    return state


@dynamo.unwrapped_by_dynamo
def begin(wrapper: Wrapper) -> ModuleState:
    """A wrapper is about to run: see that it can, as the others do and in the right precision."""
    if autograd.inside_function_transform():
        raise NotImplementedError(
            "torch.func transforms (grad, vjp, jvp, vmap) of a wrapped module: transform it while "
            "its parameters are full, in FullyShardedDataParallel.summon_full_params(model), or "
            "shard it by fully_shard, which takes jvp and vmap as they are"
        )
    state = ready(wrapper)
    if state.is_root and wrapper._use_full_prec_in_eval:
        follow_modes(wrapper)
    if autograd.inside_backward():  # a recomputation
        return state
    order, trains = wrapper._order or _share_order(wrapper), wrapper.training
    if state.is_root:
        order.begin(trains=trains)
    if wrapper._unit is not None:
        order.enter(wrapper._unit, is_new=not wrapper._have_run, trains=trains)
    return state


def note_run(unit: Unit, models: Sequence[nn.Module]) -> None:
    """The wrapper of a unit has run on other ranks: it is compared with them no more."""
    for model in models:
        for wrapper in wrappers_below(model):
            if wrapper._unit is unit:
                wrapper._have_run = True


def _share_order(root: Wrapper) -> ForwardOrder:
    """The order of a wrapper that runs for the first time, and of all below it."""
    order = ForwardOrder()
    for one in wrappers_below(root):
        one._order = order
        state = state_of(one)
        for unit in state.units if order.is_watched and state is not None else ():
            unit.options = replace(unit.options, forward_prefetch=())
    return order


def _check_tree(root: Wrapper) -> None:
    """Refuse wrappers that cannot work together, before they do."""
    wrappers = wrappers_below(root)
    for attribute in _HOMOGENEOUS:
        values = {getattr(one, attribute) for one in wrappers}
        if len(values) > 1:
            raise ValueError(
                f"Expects one homogeneous value for {attribute} but got {values}: give it to all "
                "wrappers of a model alike"
            )
    for one in wrappers:
        _check_group(one)
        if one._unit is None:
            continue
        _check_device(one, one._unit.shards.members[0].sharded.device)
        for parameter in one._unit.sharded_parameters():
            if hasattr(parameter, _IN_BACKWARD) and not hasattr(parameter, _STEPS):
                if not one._use_orig_params:
                    raise RuntimeError(
                        "FSDP optimizer in backward only supported with use_orig_params=True!"
                    )
                setattr(parameter, _STEPS, True)  # its wrapper may come to be in another one
                parameter.register_post_accumulate_grad_hook(_step)


def _check_group(wrapper: Wrapper) -> None:
    """Refuse to run what was wrapped only to be looked at, for ranks that are not there."""
    group = wrapper.process_group
    if wrapper.world_size > 1 and not isinstance(group, dist.ProcessGroup):
        raise NotImplementedError(
            f"process_group is a {type(group).__name__} of {wrapper.world_size} ranks, which is no "
            "torch.distributed.ProcessGroup: a module can be wrapped with it, but only one of a "
            "single rank can run"
        )


def _check_device(wrapper: Wrapper, device: torch.device) -> None:
    """Refuse parameters that somebody has moved, or forgot to move."""
    if wrapper.cpu_offload.offload_params:
        if device.type != "cpu":
            raise RuntimeError(
                "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
                f"{device}. Make sure to not move the module from CPU when offloading parameters."
            )
    elif device != wrapper.compute_device:
        raise RuntimeError(
            f"An FSDP-managed module unexpectedly has parameters on {device}. Make sure to move "
            f"the module to {wrapper.compute_device} before training."
        )


def _step(parameter: torch.Tensor) -> None:
    """Let a parameter's own optimizers have the gradient that has just arrived."""
    if parameter.grad is not None:  # a rank that holds nothing of it has none
        for optimizer in getattr(parameter, _IN_BACKWARD):
            optimizer.step()
        parameter.grad = None

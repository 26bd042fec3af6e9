"""Saying where an error began: in which step, and in which unit of the model."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shoal.runtime.fsdp_module import own_state
from shoal.runtime.module_state import context_of, state_of
from shoal.step.phase import Phase


@contextmanager
def naming_step(step: int, model: nn.Module) -> Iterator[None]:
    """Add to an error in which step it was raised, and what the model was computing."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in step {step}{_place(model, error)}")
        raise


def _place(model: nn.Module, error: BaseException) -> str:
    """What was being computed: calls tell it of forward, the units' phases of backward."""
    called = [
        unit.name
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if isinstance(module := frame.f_locals.get("self"), nn.Module)
        and (state := state_of(module)) is not None
        for unit in state.units
    ]
    if called:
        return f", in the forward of unit {called[-1]!r}"
    context = context_of(model, own_state(model))
    computing = [unit for unit in context.units if unit.phase is Phase.BACKWARD]
    # The root computes as long as any unit in it does, so an inner one tells more.
    inner = [unit for unit in computing if unit not in context.roots] or computing
    return f", in the backward of unit {inner[-1].name!r}" if inner else ""

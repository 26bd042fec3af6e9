"""What the units of one model share: their order, the reductions in flight, the open step.

A model is the module whose forward is called first and everything below it. Each method here
is what one moment of a step means for a unit; `hooks` only decides when it is called.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from shoal import _torch
from shoal.errors import InvariantError
from shoal.runtime.events import EventKind, Mark, Recorder
from shoal.runtime.phase import Phase
from shoal.runtime.schedule import Order
from shoal.runtime.unit import Pass, Reduction, Unit

_MAX_REDUCTIONS = 2
"""Reductions in flight: one runs while the next one's gradients are computed."""


class Context:
    """The running step of one model."""

    def __init__(self, units: Sequence[Unit], root: Unit | None) -> None:
        self.units = tuple(units)
        self.recorder: Recorder | None = None
        self._root = root
        self._order = Order(self.units)
        self._seen: dict[Unit, None] = {}
        self._reductions: deque[tuple[Reduction, Mark | None]] = deque()
        self._launched: dict[Unit, Mark | None] = {}
        self._began: dict[Unit, Mark | None] = {}
        # Autograd owns the callback that ends a backward. When a backward raises, autograd drops
        # it: a dead reference tells that the step will never end.
        self._end: weakref.ref[Callable[[], None]] | None = None

    def begin_forward(self) -> None:
        """The model's forward starts: nothing of an earlier step may be taken for current."""
        if _torch.inside_backward():
            return
        self._abandon_broken_backward()
        for unit in self.units:
            if unit.phase is Phase.HELD and not unit.is_kept:
                unit.reshard()
        self._seen = {}

    def end_forward(self, *, expects_backward: bool) -> None:
        """The model's forward returned: its order is what the next step prefetches by."""
        if _torch.inside_backward():
            return
        self._order = Order((*self._seen, *self._order.units))
        if not expects_backward:
            for unit in self.units:
                if not unit.is_kept:
                    unit.reshard()

    def enter_forward(self, unit: Unit) -> None:
        """Give a unit its full parameters; start the gather of the one that comes next.

        In BACKWARD this is a recomputation, and everything is there.
        """
        if unit.phase is Phase.BACKWARD:
            return
        if unit.phase in (Phase.GATHERING, Phase.HELD) and unit.is_stale:
            unit.reshard()
        self._hold(unit)
        unit.phase = Phase.FORWARD
        self._began[unit] = self._mark()
        if not _torch.inside_backward():
            self._seen[unit] = None
            self._prefetch(self._order.after(unit))

    def leave_forward(self, unit: Unit, *, reshard: bool) -> None:
        """Free the unit, or hold it for its backward."""
        self._record(EventKind.FORWARD, unit, self._began.pop(unit, None))
        unit.phase = Phase.HELD
        if reshard and not unit.is_kept and not _torch.inside_backward():
            unit.reshard()

    def enter_backward(self, unit: Unit, run: Pass) -> None:
        """Give a unit its full parameters again; start the gather of the one before it."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"unit {unit.name!r}: backward(create_graph=True) through a sharded module is not "
                "supported, because the reduction of its gradients has no derivative"
            )
        self._begin_backward()
        unit.open_passes.add(run)
        if unit.phase is Phase.BACKWARD:
            return
        if run.version != unit.version:
            raise InvariantError(
                f"the parameters of unit {unit.name!r} were changed between its forward and its "
                "backward, so its gradients would belong to other weights. Call optimizer.step() "
                "or load_state_dict() after backward()."
            )
        self._hold(unit)
        unit.phase = Phase.BACKWARD
        unit.num_missing_grads = sum(member.full.requires_grad for member in unit.members)
        self._began[unit] = self._mark()
        # The root's backward comes first, although its forward came first too: it is around.
        self._prefetch(self._order.last if unit is self._root else self._order.before(unit))

    def gradient_arrived(self, unit: Unit) -> None:
        """Count a gradient; with the last one the unit is reduced.

        One that comes when the unit is not in its backward waits for the end.
        """
        self._begin_backward()
        if unit.phase is not Phase.BACKWARD:
            return
        unit.num_missing_grads -= 1
        if unit.num_missing_grads == 0:
            self._reduce(unit)
            unit.open_passes = {run for run in unit.open_passes if run.reaches_inputs}
            self._free_if_left(unit)

    def leave_backward(self, unit: Unit, run: Pass) -> None:
        """One pass has reached its inputs; after the last one the unit is freed.

        Gradients alone do not tell: a frozen layer may come after all that is trained.
        """
        unit.open_passes.discard(run)
        self._free_if_left(unit)

    def _begin_backward(self) -> None:
        self._abandon_broken_backward()
        if self._end is None:

            def end() -> None:
                self._end_backward()

            self._end = weakref.ref(end)
            _torch.call_after_backward(end)

    def _end_backward(self) -> None:
        """The whole backward is done: reduce what some parameters kept back, free the rest."""
        for unit in self.units:
            unit.open_passes.clear()
            self._free_if_left(unit)
            if unit.has_grads:
                self._reduce(unit)
            unit.reshard()
        while self._reductions:
            self._finish_reduction()
        self._end = None

    def _abandon_broken_backward(self) -> None:
        if self._end is None or self._end() is not None:
            return
        self._end = None
        reductions = tuple(self._reductions)
        self._reductions.clear()
        self._launched.clear()
        for unit in self.units:
            unit.open_passes.clear()
            unit.reshard()
            for member in unit.members:
                member.full.grad = None
        for reduction, _ in reductions:
            reduction.pending.wait()

    def _free_if_left(self, unit: Unit) -> None:
        if unit.phase is Phase.BACKWARD and not unit.open_passes:
            self._record(EventKind.BACKWARD, unit, self._began.pop(unit, None))
            unit.reshard()

    def _reduce(self, unit: Unit) -> None:
        while len(self._reductions) >= _MAX_REDUCTIONS:
            self._finish_reduction()
        self._reductions.append((unit.launch_reduce(), self._mark()))

    def _prefetch(self, unit: Unit | None) -> None:
        if unit is not None and unit.phase is Phase.SHARDED:
            self._launch_gather(unit)

    def _launch_gather(self, unit: Unit) -> None:
        self._launched[unit] = self._mark()
        unit.launch_gather()

    def _hold(self, unit: Unit) -> None:
        if unit.phase is Phase.FORWARD:  # a forward that was cut short: it raised, or recomputed
            unit.phase = Phase.HELD
        if unit.phase is Phase.HELD:
            return
        if unit.phase is Phase.SHARDED:
            self._launch_gather(unit)
        start = self._mark()
        unit.wait_gather()
        self._record(EventKind.GATHER_WAIT, unit, start)
        self._record(EventKind.GATHER, unit, self._launched.pop(unit, None))
        unit.finish_gather()

    def _finish_reduction(self) -> None:
        reduction, launched = self._reductions.popleft()
        start = self._mark()
        reduction.pending.wait()
        self._record(EventKind.REDUCE_WAIT, reduction.unit, start)
        self._record(EventKind.REDUCE, reduction.unit, launched)
        reduction.finish()

    def _mark(self) -> Mark | None:
        return None if self.recorder is None else self.recorder.mark()

    def _record(self, kind: EventKind, unit: Unit, start: Mark | None) -> None:
        if self.recorder is not None and start is not None:
            self.recorder.span(kind, unit.name, start, self.recorder.mark())

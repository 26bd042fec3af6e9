"""What the units of one model share: their order, the reductions in flight, the open step.

A model is the module whose forward is called first and everything below it. Each method here
is what one moment of a step means for a unit; `module_state` only decides when it is called.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal import _torch
from shoal.comm import observer
from shoal.errors import InvariantError
from shoal.runtime.arena import Arena
from shoal.runtime.events import EventKind, Mark, Recorder
from shoal.runtime.phase import Phase
from shoal.runtime.reduction import Reduction
from shoal.runtime.rows import limit_parts
from shoal.runtime.schedule import Orders
from shoal.runtime.streams import Streams
from shoal.runtime.unit import Pass, Unit


class Context:
    """The running step of one model."""

    def __init__(
        self, units: Sequence[Unit], roots: Sequence[Unit], streams: Streams | None
    ) -> None:
        self.units = tuple(units)
        self.recorder: Recorder | None = None
        self.boundary: tuple[weakref.ref[torch.Tensor], Any] | None = None
        """The output that backward was last arranged to be noticed at, and by what."""
        self.roots = frozenset(roots)
        """The units of the module that all others are in."""
        self.orders = Orders(self.units)
        self.is_in_turn = False
        """Whether ranks may use different units: then all reduce in the declared order, backwards,
        and gather before anything of their backwards runs."""
        self._turns: list[Unit] = []
        """The units that this backward has still to reduce, where it does so in turn."""
        self._num_backwards = 0
        self._is_running = False
        self._reductions: deque[tuple[Reduction, Mark | None]] = deque()
        self._arrived: deque[Reduction] = deque()
        """Reduced gradients that nobody waits for: they are put on the parameters together."""
        self._host_marks: list[torch.cuda.Event] = []
        self._launched: dict[Unit, Mark | None] = {}
        self._began: dict[Unit, Mark | None] = {}
        # Autograd owns the callback that ends a backward. When a backward raises, autograd drops
        # it: a dead reference tells that the step will never end.
        self._end: weakref.ref[Callable[[], None]] | None = None
        if units:
            self.arena = Arena(units[0].device)
            self.streams = streams or Streams(units[0].device)
            waiting = {unit for unit in self.units if unit in unit.waiting}
            for unit in self.units:
                unit.prepare(self.arena, self.streams)
                unit.on_grad(self.gradient_arrived)
                unit.waiting = waiting
            limit_parts([unit.rows for unit in self.units])

    def begin_forward(self) -> None:
        """The model's forward starts: nothing of an earlier step may be taken for current."""
        if _torch.inside_backward():
            return
        self.clear_broken_backward()
        for unit in self.units:
            if unit.phase is Phase.FORWARD:  # an earlier forward raised
                unit.phase = Phase.HELD
        self._ask_for_turns()
        observer.begin_step()
        self.orders.begin()
        # In a `full_parameters` block nothing is gathered, and one rank may run alone: an order
        # that the others have not seen would make its next gathers differ from theirs.
        self._is_running = not any(unit.is_lent for unit in self.units)

    def end_forward(self, *, expects_backward: bool) -> None:
        """The model's forward returned: its order is what the next step prefetches by."""
        if _torch.inside_backward():
            return
        self.boundary = None
        if self._is_running:
            self.orders.end()
        self._is_running = False
        if not expects_backward:
            for unit in self.units:
                if not (unit.is_kept or (unit.stays and unit.phase is Phase.HELD)):
                    unit.reshard()

    def abort_forward(self) -> None:
        """The model's forward raised: what runs next is not part of it."""
        if not _torch.inside_backward():
            self._is_running = False

    def enter_forward(self, unit: Unit, then: Sequence[Unit] | None) -> None:
        """Give a unit its full parameters; start the gather of those that come next.

        In BACKWARD this is a recomputation, and everything is there.
        """
        phase = unit.phase
        # In FORWARD it is another module of the unit, or the same one called by itself.
        if phase in (Phase.BACKWARD, Phase.FORWARD):
            return
        if not (phase is Phase.SHARDED and unit.is_bare) and unit.is_stale:
            unit.reshard()
        self._hold(unit)
        unit.phase = Phase.FORWARD
        if self.recorder is not None:
            self._began[unit] = self._mark()
        if not _torch.inside_backward():
            following = self.orders.enter(unit) if self._is_running else self.orders.after(unit)
            if then is None:
                self._prefetch(following)
            else:
                for target in then:
                    self._prefetch(target)

    def leave_forward(self, unit: Unit, *, reshard: bool) -> None:
        """Free the unit, or hold it for its backward."""
        if self.recorder is not None:
            self._record(EventKind.FORWARD, unit, self._began.pop(unit, None))
        unit.phase = Phase.HELD
        if _torch.inside_backward():
            return
        if reshard and not unit.is_kept:
            unit.reshard(to_post=True)
        else:
            unit.rest()

    def enter_backward(self, unit: Unit, run: Pass) -> None:
        """Give a unit its full parameters again; start the gather of the one before it."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"unit {unit.name!r}: backward(create_graph=True) through a sharded module is not "
                "supported, because the reduction of its gradients has no derivative"
            )
        self._begin_backward()
        unit.was_entered = True
        unit.open_passes.add(run)
        phase = unit.phase
        if phase is Phase.BACKWARD:
            return
        if phase is Phase.SHARDED and unit.options.gathers_in_backward:
            self._prefetch(unit)
        elif phase is not Phase.GATHERING:
            unit.gathered_version = unit.version_in_backward
        # The bytes that are there, or on their way, are those of this version.
        if run.version != unit.gathered_version:
            raise InvariantError(
                f"the parameters of unit {unit.name!r} were changed between its forward and its "
                "backward, so its gradients would belong to other weights. Call optimizer.step() "
                "or load_state_dict() after backward()."
            )
        if unit.options.gathers_in_backward:
            self._hold(unit)
            unit.phase = Phase.BACKWARD
        if self.recorder is not None:
            self._began[unit] = self._mark()
        if not unit.options.prefetches_late:
            self._prefetch_backward(unit)

    def _prefetch_backward(self, unit: Unit) -> None:
        if self.is_in_turn:  # all that backward needs was gathered when it began
            return
        then: Sequence[Unit | None] | None = unit.backward_prefetch
        if then is None:
            # The root's backward comes first, although its forward did too: it is around.
            is_root = unit in self.roots
            then = (self.orders.last if is_root else self.orders.before(unit),)
        for target in then:
            if target is not None and self._is_needed_in_backward(target):
                self._prefetch(target)

    def _is_needed_in_backward(self, unit: Unit) -> bool:
        # The root's backward has begun: if it is not held, backward needs no more of it.
        return unit.options.gathers_in_backward and unit not in self.roots

    @_torch.unwrapped_by_dynamo
    def gradient_arrived(self, unit: Unit) -> None:
        """A gradient was accumulated; if the unit is not in its backward, it waits for the end.

        Gradients alone never end a unit's backward: a frozen weight may still be read, and ranks
        that use different parameters would reduce in different orders.
        """
        self._begin_backward()
        if unit.phase is Phase.BACKWARD:
            return
        is_freed = unit.phase in (Phase.SHARDED, Phase.GATHERING)
        if is_freed and not unit.was_entered and unit.options.gathers_in_backward:
            self._refuse_blind(unit)
        unit.has_late_grads = True

    @_torch.unwrapped_by_dynamo
    def leave_backward(self, unit: Unit, run: Pass) -> None:
        """One pass has reached its inputs; after the last one the unit is reduced and freed."""
        if run not in unit.open_passes:  # its outputs were not part of the loss
            return
        unit.open_passes.discard(run)
        run.left_in = self._num_backwards
        self._free_if_left(unit)

    def finish(self) -> None:
        """Reduce whatever gradients there are, and free all units, outside of any backward.

        Pipelines do so once, after the backwards of all micro-batches.
        """
        for unit in self.units:
            unit.has_late_grads = True
        self._end_backward()

    def reset(self) -> None:
        """Forget an unfinished step, with all gradients that have not reached the shards."""
        self._let_go()
        for unit in self.units:
            unit.forget_grads()
        for reduction in self._take_unfinished():
            reduction.wait()

    def _let_go(self) -> None:
        """Free what an unfinished step has gathered."""
        self._end = None
        self._launched.clear()
        self._began.clear()
        self._turns.clear()
        for unit in self.units:
            unit.open_passes.clear()
            unit.noted = None
            unit.was_reduced = unit.was_entered = unit.has_late_grads = False
            unit.reshard()

    def _unfinished(self) -> list[Reduction]:
        """The reductions whose gradients are not on the parameters yet, in order."""
        return [*self._arrived, *(reduction for reduction, _ in self._reductions)]

    def _take_unfinished(self) -> list[Reduction]:
        unfinished = self._unfinished()
        self._arrived.clear()
        self._reductions.clear()
        return unfinished

    def _keep_broken(self, _: object = None) -> None:
        """A backward raised: what was accumulated until then stays, as without shards.

        Called while the exception is on its way, so it waits for nobody. Then the caller may zero
        gradients, which is seen by marks that are left on the parameters.
        """
        for unit in self.units:
            unit.keep_broken_grads()
        for reduction in self._unfinished():
            reduction.unit.mark(reduction.indices)

    @torch.inference_mode(False)  # gradients are the user's, whatever comes to ask for room
    @torch.no_grad()
    def _clear_away(self) -> None:
        """Be ready for another step after a backward that raised, and finish its reductions."""
        self._let_go()
        zeroed = {unit: unit.settle_marks() for unit in self.units}
        unfinished = self._take_unfinished()
        for reduction in unfinished:
            dropped = zeroed[reduction.unit]
            reduction.indices = [index for index in reduction.indices if index not in dropped]
            reduction.wait()
            if reduction.host_mark is not None:
                reduction.host_mark.synchronize()
        self._arrived.extend(unfinished)
        try:
            self._take_arrived()
        finally:
            for unit in self.units:
                unit.mark_waiting()

    def _refuse_blind(self, unit: Unit) -> None:
        raise InvariantError(
            f"backward came to unit {unit.name!r} while its parameters were freed, so it has read "
            "no weights: it did not come through an output of the module. Return the loss (or "
            "whatever backward starts from) from the module's forward instead of keeping it as an "
            "attribute, or call module.unshard() before that backward."
        )

    def _begin_backward(self) -> None:
        if self._end is not None and self._end() is not None:
            return
        if _torch.inside_compiled_autograd():
            raise NotImplementedError(
                "shoal: compiled autograd is not supported for sharded modules, because it "
                "accumulates gradients when the engine has ended the step; compile forwards "
                "(module.compile()), or the step with torch.compile(model, backend='shoal')"
            )
        self.clear_broken_backward()
        # All units at once, and not each when its turn comes: a third of the time.
        for unit in self.units:
            unit.settle_marks()
            unit.note_operations()
        self._num_backwards += 1
        self._take_turns()

        def end() -> None:
            try:
                self._end_backward()
            except BaseException:
                # Whoever keeps the exception keeps this function alive: do not look at that.
                self._keep_broken()
                self._clear_away()
                raise

        self._end = weakref.ref(end, self._keep_broken)
        _torch.call_after_backward(end)

    def _end_backward(self) -> None:
        """The whole backward is done: reduce what some parameters kept back, free the rest."""
        for unit in reversed(self.units):
            unit.open_passes.clear()
            has_grads = unit.has_late_grads or unit.phase is Phase.BACKWARD or unit in self._turns
            if has_grads or unit.waits_for_reduction:
                if unit.phase in (Phase.SHARDED, Phase.GATHERING) and unit.shards.have_moved:
                    unit.reshard()  # maybe gathered ahead, of shards that have been replaced
                    unit.follow()
                self._reduce(unit)
            if unit.phase is Phase.BACKWARD:
                self._free(unit)
            elif unit.phase is Phase.FORWARD and self._is_running:
                pass  # it asked for gradients inside of its forward, which goes on
            elif unit.options.reshards_after_backward:
                unit.reshard()
            elif unit.phase is Phase.GATHERING and self.is_in_turn:
                unit.finish_gather()  # held, as on ranks whose backward came to it
            elif unit.phase is not Phase.HELD:
                unit.reshard()
        self._turns.clear()
        for unit in self.units:
            unit.was_reduced = unit.was_entered = unit.has_late_grads = False
            unit.noted = None
        while self._reductions:
            self._finish_reduction()
        self._take_arrived()
        for mark in self._host_marks:
            mark.synchronize()
        self._host_marks.clear()
        self._end = None

    def clear_broken_backward(self) -> None:
        """Be ready for something else if a backward raised; otherwise do nothing."""
        if self._end is not None and self._end() is None:
            self._clear_away()

    def _free_if_left(self, unit: Unit) -> None:
        if unit.phase is not Phase.BACKWARD or unit.open_passes:
            return
        if not self.is_in_turn:
            self._reduce(unit)
        elif self._is_over(unit):
            self._reduce_in_turn()
        else:  # held, since to gather it again would be another rank's gather of something else
            return
        self._free(unit)
        if unit.options.prefetches_late:
            self._prefetch_backward(unit)

    def _ask_for_turns(self) -> None:
        self.is_in_turn = any(unit.options.reduces_unused for unit in self.units)

    def _take_turns(self) -> None:
        """A backward begins: where ranks may come to units in different orders, settle on one.

        That of gathers and reductions in one group has to be the same. A rank cannot know which
        units it will come to next. So gathers come first, all of them, and reductions wait.
        """
        self._ask_for_turns()
        if not self.is_in_turn:
            return
        backwards = self.units[::-1]
        self._turns = [unit for unit in backwards if unit.trained]
        for unit in backwards:
            if unit.options.gathers_in_backward:
                self._prefetch(unit)

    def _is_over(self, unit: Unit) -> bool:
        """Whether this backward comes to a unit no more: it has left every pass there is."""
        is_left = [run.left_in == self._num_backwards for run in unit.passes]
        return bool(is_left) and all(is_left) and not unit.open_passes

    def _reduce_in_turn(self) -> None:
        """Reduce the units that backward is done with, up to the first that it may yet come to."""
        while self._turns and self._is_over(self._turns[0]):
            self._reduce(self._turns.pop(0))

    def _free(self, unit: Unit) -> None:
        if unit.phase is not Phase.BACKWARD:
            return
        if self.recorder is not None:
            self._record(EventKind.BACKWARD, unit, self._began.pop(unit, None))
        if unit.options.reshards_after_backward:
            unit.reshard()
        else:
            unit.phase = Phase.HELD
            unit.rest()

    def _reduce(self, unit: Unit) -> None:
        if not unit.options.reduces:
            unit.keep_grads()
            return
        grads = unit.take_grads()
        if not grads and not unit.waits_for_reduction:
            return
        self._free(unit)  # before memory is needed for the reduction
        while len(self._reductions) >= unit.options.max_reductions:
            self._finish_reduction()
        reduction = unit.launch_reduce(grads)
        if reduction is not None:
            self._reductions.append((reduction, self._mark()))

    def _prefetch(self, unit: Unit | None) -> None:
        if unit is not None and unit.phase is Phase.SHARDED:
            if self.recorder is not None:
                self._launched[unit] = self._mark()
            unit.launch_gather()

    def _hold(self, unit: Unit) -> None:
        phase = unit.phase
        if phase is Phase.FORWARD:  # a forward that was cut short: it raised, or recomputed
            unit.phase = Phase.HELD
            return
        if phase is Phase.HELD:
            if not _torch.inside_backward():
                unit.follow_requires_grad()
            return
        self._prefetch(unit)
        if self.recorder is not None:
            start = self._mark()
            unit.wait_gather()
            self._record(EventKind.GATHER_WAIT, unit, start)
            self._record(EventKind.GATHER, unit, self._launched.pop(unit, None))
        unit.finish_gather()

    def _finish_reduction(self) -> None:
        reduction, launched = self._reductions.popleft()
        if self.recorder is not None:
            start = self._mark()
            reduction.wait()
            self._record(EventKind.REDUCE_WAIT, reduction.unit, start)
            self._record(EventKind.REDUCE, reduction.unit, launched)
        reduction.wait()
        if reduction.can_wait:
            self._arrived.append(reduction)
            return
        # A hook may look at other parameters too: in order, as if nobody had waited.
        self._take_arrived()
        mark = reduction.finish()
        if mark is not None:
            self._host_marks.append(mark)

    def _take_arrived(self) -> None:
        while self._arrived:  # one by one: a user's hook may raise
            self._arrived.popleft().finish()

    def _mark(self) -> Mark | None:
        return None if self.recorder is None else self.recorder.mark()

    def _record(self, kind: EventKind, unit: Unit, start: Mark | None) -> None:
        if self.recorder is not None and start is not None:
            self.recorder.span(kind, unit.name, start, self.recorder.mark())

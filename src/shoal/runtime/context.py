"""The eager executor: tells the step machine of moments, and performs the actions it answers with.

A model is the module whose forward is called first and everything below it. What the units of one
model share lives here: memory, streams, reductions in flight, the end of the running backward.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shoal._torch import autograd, dynamo, subclasses
from shoal.comm import observer
from shoal.errors import InvariantError
from shoal.runtime.arena import Arena
from shoal.runtime.gradient_matrix import limit_parts
from shoal.runtime.recorder import Recorder
from shoal.runtime.reduction import PackedGradients, Reduction
from shoal.runtime.streams import Streams
from shoal.runtime.unit import PERFORM, Unit
from shoal.step.action import OF_FULL, Action, ActionKind, Actions
from shoal.step.machine import Machine
from shoal.step.phase import COMPUTING, Phase
from shoal.step.unit_step import ModuleRun, undo


class Context:
    """The running step of one model."""

    def __init__(
        self, units: Sequence[Unit], roots: Sequence[Unit], streams: Streams | None
    ) -> None:
        self.units = tuple(units)
        self.roots = frozenset(roots)
        """The units of the module that all others are in."""
        self.machine = Machine([unit.step for unit in units], [unit.step for unit in roots])
        self.recorder: Recorder | None = None
        self.boundary: tuple[weakref.ref[torch.Tensor], Any] | None = None
        """The output that backward was last arranged to be noticed at, and by what."""
        self._taken: dict[Unit, dict[int, torch.Tensor]] = {}
        """Gradients between the moment that they are taken and that of their reduction."""
        self._packed: dict[Unit, PackedGradients | None] = {}
        """The same, once they are in one matrix; None: there is nothing to reduce."""
        self._reductions: deque[Reduction | None] = deque()
        """Those in flight, as the machine counts them; None: there was nothing to reduce."""
        self._arrived: deque[Reduction] = deque()
        """Reduced gradients that nobody waits for: they are put on the parameters together."""
        self._host_marks: list[torch.cuda.Event] = []
        # Autograd owns the callback that ends a backward. When a backward raises, autograd drops
        # it: a dead reference tells that the step will never end.
        self._end: weakref.ref[Callable[[], None]] | None = None
        self._keeps_graph = False
        """Whether another backward over the graph of this one may follow."""
        if units:
            self.arena = Arena(units[0].device)
            self.streams = streams or Streams(units[0].device)
            waiting = {unit for unit in self.units if unit in unit.gradients.waiting}
            for unit in self.units:
                unit.prepare(self.arena, self.streams)
                unit.on_grad(self.gradient_arrived)
                unit.gradients.waiting = waiting
            limit_parts([unit.matrix for unit in self.units])

    # Moments of forward.

    def begin_forward(self) -> None:
        """The model's forward starts."""
        if autograd.inside_backward():
            return
        self.clear_broken_backward()
        observer.begin_step()
        self.machine.begin_forward()

    def enter_forward(self, unit: Unit, user: object = None) -> None:
        """A unit is about to compute."""
        step = unit.step
        is_stale = not step.is_bare and step.phase not in COMPUTING and unit.is_stale
        is_nested = autograd.inside_backward()
        self._perform(
            self.machine.enter_forward(step, is_stale=is_stale, is_nested=is_nested, user=user)
        )

    def leave_forward(
        self, unit: Unit, *, is_reached: bool, is_expected: bool, user: object = None
    ) -> None:
        """A unit has computed; its outputs have derivatives, or may have."""
        self._perform(
            self.machine.leave_forward(
                unit.step,
                is_reached=is_reached,
                is_expected=is_expected,
                is_nested=autograd.inside_backward(),
                user=user,
            )
        )

    def end_forward(self, *, expects_backward: bool) -> None:
        """The model's forward returned."""
        if not autograd.inside_backward():
            self.boundary = None
            self._perform(self.machine.end_forward(expects_backward=expects_backward))

    def abort_forward(self, units: Sequence[Unit], *, is_root: bool, user: object = None) -> None:
        """The forward of a module with these units raised."""
        if is_root and not autograd.inside_backward():
            self.machine.abort_forward()
        for unit in units:
            self._perform(self.machine.raise_forward(unit.step, user=user))

    # Moments of backward.

    def enter_backward(self, unit: Unit, run: ModuleRun) -> None:
        """Backward has come to the outputs of a run."""
        self._begin_backward()
        is_current = unit.step.phase is Phase.BACKWARD or self._is_current(unit, run)
        creates_graph = torch.is_grad_enabled()
        if creates_graph:  # its gradients may come to any parameter, without the others
            unit.watch_all_grads()
        self._perform_in_backward(
            self.machine.enter_backward(
                unit.step, run, is_current=is_current, creates_graph=creates_graph
            )
        )

    def _is_current(self, unit: Unit, run: ModuleRun) -> bool:
        """Whether the bytes that are there, or on their way, or about to be, are those of a run."""
        step = unit.step
        if step.phase is not Phase.GATHERING and not (step.is_stashed or step.is_copied):
            unit.gathered_version = unit.version_in_backward
        return run.version == unit.gathered_version

    @dynamo.unwrapped_by_dynamo
    def leave_backward(self, unit: Unit, run: ModuleRun) -> None:
        """One run has reached its inputs."""
        for step in self.machine.reducible(unit.step, run):
            step.owner.gradients.note()
        self._perform_in_backward(self.machine.leave_backward(unit.step, run))

    @dynamo.unwrapped_by_dynamo
    def gradient_arrived(self, unit: Unit, *, is_handed_over: bool = False) -> None:
        """A gradient was accumulated, maybe outside of the unit's backward."""
        self._begin_backward()
        self._perform_in_backward(
            self.machine.gradient_arrived(unit.step, is_handed_over=is_handed_over)
        )

    def finish(self) -> None:
        """Reduce whatever gradients there are, and free all units, outside of any backward."""
        for unit in self.units:
            unit.gradients.note()
        self._perform(self.machine.reduce_all())
        self._end = None

    def _begin_backward(self) -> None:
        if self._end is not None and self._end() is not None:
            return
        if autograd.inside_compiled_autograd():
            raise NotImplementedError(
                "shoal: compiled autograd is not supported for sharded modules, because it "
                "accumulates gradients when the engine has ended the step; compile forwards "
                "(module.compile()), or the step with torch.compile(model, backend='shoal')"
            )
        self.clear_broken_backward()
        self._note_shards()

        def end() -> None:
            try:
                self._end_backward()
            except BaseException:
                # Whoever keeps the exception keeps this function alive: do not look at that.
                self._keep_broken()
                self._clear_away()
                raise

        self._end = weakref.ref(end, self._keep_broken)
        self._keeps_graph = autograd.keeps_graph()
        autograd.call_after_backward(end)
        self._perform_in_backward(
            self.machine.begin_backward(creates_graph=torch.is_grad_enabled())
        )

    def _note_shards(self) -> None:
        """Look at what users have done to shards and gradients before this backward."""
        # All units at once, and not each when its turn comes: a third of the time.
        for unit in self.units:
            unit.gradients.settle_marks()
            unit.note_operations()

    def _end_backward(self) -> None:
        with subclasses.no_torch_function_subclass():  # freed parameters would answer in Python
            for unit in self.units:
                unit.gradients.note()
                unit.noted = None
        self._perform_in_backward(self.machine.end_backward(keeps_graph=self._keeps_graph))
        self._end = None

    # Moments of another rank's step, which this rank has no inputs for.

    def shadow(self, name: str, answer: Callable[[], Actions]) -> None:
        """Do what the machine answers to a moment that another rank's machine was told."""
        if name == "abandon":
            self._clear_away()
            return
        if name == "begin_backward":
            self._note_shards()
        actions = answer()
        if name == "end_backward":
            for unit in self.units:
                unit.noted = None
        self._perform(actions)

    # A step that does not end as planned.

    def clear_broken_backward(self) -> None:
        """Be ready for something else if a backward raised; otherwise do nothing."""
        if self._end is not None and self._end() is None:
            self._clear_away()

    def reset(self) -> None:
        """Forget an unfinished step, with all gradients that have not reached the shards."""
        self._let_go()
        for unit in self.units:
            unit.gradients.forget()
        for reduction in self._take_unfinished():
            reduction.wait()

    def disown(self) -> None:
        """Have no part in the units any more, whatever becomes of a broken backward."""
        self._end = None
        self._taken.clear()
        self._packed.clear()
        self._reductions.clear()
        self._arrived.clear()
        self._host_marks.clear()
        self.boundary = None

    def _let_go(self) -> None:
        """Free what an unfinished step has gathered."""
        self._end = None
        self._taken.clear()
        self._packed.clear()
        for unit in self.units:
            unit.noted = None
        self._perform(self.machine.abandon())
        if self.recorder is not None:
            self.recorder.forget_open()

    def _unfinished(self) -> list[Reduction]:
        """The reductions whose gradients are not on the parameters yet, in order."""
        in_flight = [reduction for reduction in self._reductions if reduction is not None]
        return [*self._arrived, *in_flight]

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
            packed = self._packed.pop(unit, None)
            taken = self._taken.pop(unit, None) if packed is None else unit.reducer.unpack(packed)
            unit.gradients.keep_broken(taken)
        for reduction in self._unfinished():
            reduction.unit.gradients.mark(reduction.indices)

    @torch.inference_mode(False)  # gradients are the user's, whatever comes to ask for room
    @torch.no_grad()
    def _clear_away(self) -> None:
        """Be ready for another step after a backward that raised, and finish its reductions."""
        self._let_go()
        zeroed = {unit: unit.gradients.settle_marks() for unit in self.units}
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
                unit.gradients.mark_waiting()

    # Actions.

    def _perform(self, actions: Actions) -> None:
        """Do what the machine asks for; tell it what did not happen, if something raises."""
        done = 0
        try:
            recorder = self.recorder
            if recorder is not None:
                for action in actions:
                    self._perform_recorded(action, recorder)
                    done += 1
                return
            for kind, step in actions:
                perform = PERFORM.get(kind)
                if perform is not None:
                    perform(step.owner)
                else:
                    _PERFORM[kind](self, step.owner)
                done += 1
        except BaseException:
            if done < len(actions):
                undo(actions[done:])
            raise

    def _perform_in_backward(self, actions: Actions) -> None:
        """The same; what the engine does is no part of a graph that a backward may create."""
        if actions and torch.is_grad_enabled():
            with torch.no_grad():
                self._perform(actions)
        else:
            self._perform(actions)

    def _perform_recorded(self, action: Action, recorder: Recorder) -> None:
        """The same, with its time and bytes."""
        kind, unit = action.kind, action.unit.owner
        running = recorder.begin(action)
        if kind is ActionKind.WAIT:
            unit.wait_gather()
            recorder.end(action, running)  # what comes now is computed
        elif kind is ActionKind.FINISH and (reduction := self._reductions[0]) is not None:
            reduction.wait()
            recorder.end(action, running)
        (PERFORM.get(kind) or partial(_PERFORM[kind], self))(unit)
        if kind in OF_FULL:
            is_gather = kind is ActionKind.GATHER
            running.num_bytes = unit.gather_bytes if is_gather else unit.full.gathered.nbytes
        elif kind in (ActionKind.COPY, ActionKind.DISCARD):
            running.num_bytes = unit.shards.buffer.nbytes
        elif kind is ActionKind.REDUCE and (reduction := self._reductions[-1]) is not None:
            running.num_bytes = reduction.num_bytes
        recorder.end(action, running)

    def _take(self, unit: Unit) -> None:
        self._taken[unit] = unit.gradients.take()

    def _pack(self, unit: Unit) -> None:
        self._packed[unit] = unit.gradients.pack(self._taken.pop(unit))

    def _reduce(self, unit: Unit) -> None:
        packed = self._packed[unit]
        reduction = None if packed is None else unit.reducer.launch(packed)
        del self._packed[unit]  # now, since what raises must not lose gradients
        self._reductions.append(reduction)

    def _finish_reduction(self, _: Unit) -> None:
        reduction = self._reductions.popleft()
        if reduction is None:
            return
        reduction.wait()
        if reduction.can_wait:
            self._arrived.append(reduction)
            return
        # A hook may look at other parameters too: in order, as if nobody had waited.
        self._take_arrived()
        mark = reduction.finish()
        if mark is not None:
            self._host_marks.append(mark)

    def _place(self, _: Unit) -> None:
        self._take_arrived()
        for mark in self._host_marks:
            mark.synchronize()
        self._host_marks.clear()

    def _take_arrived(self) -> None:
        while self._arrived:  # one by one: a user's hook may raise
            self._arrived.popleft().finish()


def _compute(_: Context, __: Unit) -> None:
    """The module computes by itself."""


def _refuse_changed(_: Context, unit: Unit) -> None:
    raise InvariantError(
        f"the parameters of unit {unit.name!r} were changed between its forward and its "
        "backward, so its gradients would belong to other weights. Call optimizer.step() or "
        "load_state_dict() after backward()."
    )


def _refuse_blind(_: Context, unit: Unit) -> None:
    raise InvariantError(
        f"backward came to unit {unit.name!r} while its parameters were freed, so it has read no "
        "weights: it did not come through an output of the module. Return the loss (or whatever "
        "backward starts from) from the module's forward instead of keeping it as an attribute, "
        "or call module.unshard() before that backward."
    )


_PERFORM: dict[ActionKind, Callable[[Context, Unit], None]] = {
    ActionKind.FORWARD: _compute,
    ActionKind.BACKWARD: _compute,
    ActionKind.REFUSE_CHANGED: _refuse_changed,
    ActionKind.REFUSE_BLIND: _refuse_blind,
    ActionKind.TAKE: Context._take,
    ActionKind.SUM: lambda _, unit: unit.gradients.keep(),
    ActionKind.PACK: Context._pack,
    ActionKind.REDUCE: Context._reduce,
    ActionKind.FINISH: Context._finish_reduction,
    ActionKind.PLACE: Context._place,
}

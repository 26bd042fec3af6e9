"""The step machine: each method is a moment of a step, and returns what to do in it.

It owns every *when*: phases, open runs, orders, prefetching, how many reductions are in flight,
what is kept between forward and backward, which reductions are late. Executors perform actions in
order, and say what of them did not happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile

from shoal.step.action import Action, ActionKind, Actions
from shoal.step.orders import Orders
from shoal.step.phase import COMPUTING, Phase
from shoal.step.unit_step import ModuleRun, UnitStep

_FREED = (Phase.SHARDED, Phase.GATHERING)


class Machine:
    """The running step of one model."""

    def __init__(self, units: Sequence[UnitStep], roots: Iterable[UnitStep] = ()) -> None:
        self.units = tuple(units)
        self.roots = frozenset(roots)
        """The units of the module that all others are in."""
        self.orders: Orders[UnitStep] = Orders(self.units)
        self.is_in_turn = False
        """Whether ranks may use different units: then all reduce in the declared order, backwards,
        and gather before anything of their backwards runs."""
        self._turns: list[UnitStep] = []
        """The units that this backward has still to reduce, where it does so in turn."""
        self._num_backwards = 0
        self._is_running = False
        """Whether a forward runs whose order is worth remembering."""
        self._in_flight: deque[UnitStep] = deque()

    # Forward.

    def begin_forward(self) -> None:
        """The model's forward starts: nothing of an earlier one may be taken for current."""
        for unit in self.units:
            if unit.phase is Phase.FORWARD:  # an earlier forward raised
                unit.phase = Phase.HELD
            unit.position = None
        self._ask_for_turns()
        self.orders.begin()
        # In a `full_parameters` block nothing is gathered, and one rank may run alone: an order
        # that the others have not seen would make its next gathers differ from theirs.
        self._is_running = not any(unit.is_lent for unit in self.units)

    def enter_forward(
        self, unit: UnitStep, *, is_stale: bool, is_nested: bool = False, user: object = None
    ) -> Actions:
        """A unit is about to compute: hold it, and gather ahead what comes next.

        `is_stale` says that its shards were changed since they were gathered, `is_nested` that it
        happens inside of a backward; `user` is whatever computes. In BACKWARD this is a
        recomputation, and everything is there. In FORWARD it is another module of the unit, or one
        that shares its parameters, or the same one called by itself.
        """
        if unit.phase in COMPUTING:
            if unit.phase is Phase.FORWARD:
                unit.users.add(user)
            return ()
        actions = list(unit.release()) if is_stale else []
        self._hold(unit, actions)
        actions.append(unit.begin(Phase.FORWARD))
        unit.users = {user}
        if not is_nested:
            self._prefetch_forward(unit, actions)
        return tuple(actions)

    def leave_forward(
        self,
        unit: UnitStep,
        *,
        is_reached: bool = True,
        is_expected: bool = True,
        is_nested: bool = False,
        user: object = None,
    ) -> Actions:
        """A unit has computed: free it, or let it rest until its backward.

        `is_reached` says that its outputs have derivatives, `is_expected` that they may have.
        """
        if not self._is_last_user(unit, user):
            return ()
        # Whoever asked for full parameters after forward wants them in evaluations too.
        unit.stays = unit.settings.reshards_after_forward is False
        unit.phase = Phase.HELD
        if is_nested:
            return ()
        reshards = self.frees_after_forward(unit)
        frees = (reshards and is_reached) or not (is_expected or unit.stays)
        if frees and not (unit.is_kept or unit.is_in_graph):
            return (unit.stash(),)
        return (unit.do(ActionKind.REST),)

    def frees_after_forward(self, unit: UnitStep) -> bool:
        """Whether a unit is freed between forward and backward, so that backward gathers again."""
        reshards = unit.settings.reshards_after_forward
        return unit not in self.roots if reshards is None else reshards

    def raise_forward(self, unit: UnitStep, *, user: object = None) -> Actions:
        """A unit's forward raised."""
        if not self._is_last_user(unit, user):
            return ()
        unit.phase = Phase.HELD
        return (unit.do(ActionKind.REST),)

    def end_forward(self, *, expects_backward: bool) -> Actions:
        """The model's forward returned: its order is what the next step prefetches by."""
        if self._is_running:
            self.orders.end()
        self._is_running = False
        actions: list[Action] = []
        for unit in self.units:
            actions += unit.discard_copy()  # its forward did not come
        if not expects_backward:
            for unit in self.units:
                stays = unit.is_kept or unit.is_in_graph
                if not (stays or (unit.stays and unit.phase is Phase.HELD)):
                    actions += unit.release()
        return tuple(actions)

    def abort_forward(self) -> None:
        """The model's forward raised: what runs next is not part of it."""
        self._is_running = False

    # Backward.

    def begin_backward(self, *, creates_graph: bool = False) -> Actions:
        """A backward has come to the model.

        Where ranks may come to units in different orders, they settle on one: that of gathers and
        reductions in one group has to be the same, and a rank cannot know which units it will come
        to next. So gathers come first, all of them, and reductions wait. What stays full for a
        graph of gradients has to be the same too: all units, as any rank may come to any of them.
        """
        self._num_backwards += 1
        self._ask_for_turns()
        actions: list[Action] = []
        if self.is_in_turn:
            backwards = self.units[::-1]
            self._turns = [unit for unit in backwards if unit.is_trained]
            for unit in backwards:
                actions += unit.discard_copy()
                if unit.is_bare:  # else it is gathered from the piece that is kept of it
                    actions.append(unit.do(ActionKind.FOLLOW))
                if unit.settings.gathers_in_backward or unit.is_borrowed:
                    actions += unit.prefetch()
                unit.is_in_graph |= creates_graph
        return tuple(actions)

    def enter_backward(
        self,
        unit: UnitStep,
        run: ModuleRun,
        *,
        is_current: bool = True,
        creates_graph: bool = False,
    ) -> Actions:
        """Backward has come to the outputs of a run: hold its unit, gather ahead what comes next.

        `is_current` says that the parameters are those of the forward, `creates_graph` that the
        gradients can be differentiated. To do so reads the parameters again, and comes through no
        module: then the unit stays full until a backward ends that keeps no graph.
        """
        unit.is_entered = True
        unit.is_in_graph |= creates_graph
        unit.open_runs.add(run)
        if unit.phase is Phase.BACKWARD:
            return ()
        if not is_current:
            return (unit.do(ActionKind.REFUSE_CHANGED),)
        actions: list[Action] = []
        if unit.settings.gathers_in_backward or run.is_borrowed:
            self._hold(unit, actions)
            actions.append(unit.begin(Phase.BACKWARD))
        if not unit.settings.prefetches_late:
            self._prefetch_backward(unit, actions, run.position)
        return tuple(actions)

    def reducible(self, unit: UnitStep, run: ModuleRun) -> Sequence[UnitStep]:
        """What `leave_backward` may reduce: it has to know of these whether they have gradients."""
        if len(unit.open_runs) != 1 or run not in unit.open_runs:
            return ()
        if not self.is_in_turn:
            return (unit,)
        return list(takewhile(lambda one: one is unit or self._is_over(one), self._turns))

    def leave_backward(self, unit: UnitStep, run: ModuleRun) -> Actions:
        """One run has reached its inputs; after the last one the unit is reduced and freed."""
        if run not in unit.open_runs:  # its outputs were not part of the loss
            return ()
        unit.open_runs.discard(run)
        run.left_in = self._num_backwards
        if unit.phase is not Phase.BACKWARD or unit.open_runs:
            return ()
        actions: list[Action] = []
        if not self.is_in_turn:
            self._reduce(unit, actions, partial(self._gather_for_next, run.position))
        elif self._is_over(unit):
            while self._turns and self._is_over(self._turns[0]):
                self._reduce(self._turns.pop(0), actions)
        else:  # held, since to gather it again would be another rank's gather of something else
            return ()
        self._free(unit, actions)
        if unit.settings.prefetches_late:
            self._prefetch_backward(unit, actions, run.position)
        return tuple(actions)

    def gradient_arrived(self, unit: UnitStep, *, is_handed_over: bool = False) -> Actions:
        """A gradient was accumulated; if the unit is not in its backward, it waits for the end.

        Gradients alone never end a unit's backward: a frozen weight may still be read, and ranks
        that use different parameters would reduce in different orders. `is_handed_over` says that
        it comes from a backward that did without the machine.
        """
        if is_handed_over:
            unit.is_entered = True
        if unit.phase is Phase.BACKWARD:
            return ()
        is_blind = unit.phase in _FREED and not unit.is_entered
        if is_blind and unit.settings.gathers_in_backward:
            return (unit.do(ActionKind.REFUSE_BLIND),)
        unit.has_late_grads = True
        return ()

    def end_backward(self, *, keeps_graph: bool = False) -> Actions:
        """The whole backward is done: reduce what some parameters kept back, free the rest.

        `keeps_graph` says that another one over the same graph may follow.
        """
        actions: list[Action] = []
        for unit in reversed(self.units):
            unit.open_runs.clear()
            has_grads = unit.has_late_grads or unit.phase is Phase.BACKWARD or unit in self._turns
            has_grads |= unit.is_in_graph and unit.has_grads
            unit.is_in_graph &= keeps_graph
            if has_grads or unit.waits_for_reduction:
                if unit.phase is Phase.GATHERING and not self.is_in_turn:
                    actions += unit.release()  # gathered ahead in vain
                if unit.phase is Phase.SHARDED:
                    actions += unit.release()  # a piece kept in vain
                    actions.append(unit.do(ActionKind.FOLLOW))
                self._reduce(unit, actions)
            self._settle(unit, actions)
        self._turns.clear()
        for unit in self.units:
            unit.forget_backward()
        while self._in_flight:
            actions.append(self._in_flight.popleft().do(ActionKind.FINISH))
        if self.units:
            actions.append(self.units[0].do(ActionKind.PLACE))
        return tuple(actions)

    def reduce_all(self) -> Actions:
        """Reduce whatever gradients there are, and free all units, outside of any backward.

        Pipelines do so once, after the backwards of all micro-batches.
        """
        for unit in self.units:
            unit.has_late_grads = True
        return self.end_backward()

    def abandon(self) -> Actions:
        """The step will never end: free what it has gathered, forget what it was about to do."""
        self._turns.clear()
        self._in_flight.clear()
        actions: list[Action] = []
        for unit in self.units:
            unit.forget_backward()
            actions += unit.release()
        return tuple(actions)

    # What moments are made of.

    def _ask_for_turns(self) -> None:
        self.is_in_turn = any(unit.settings.reduces_unused for unit in self.units)

    def _hold(self, unit: UnitStep, actions: list[Action]) -> None:
        """Have the full parameters ready to compute with."""
        if unit.phase in (Phase.HELD, Phase.FORWARD):  # in FORWARD: one that was cut short
            unit.phase = Phase.HELD
            actions.append(unit.do(ActionKind.WAKE))
            return
        actions += unit.prefetch()
        actions.append(unit.arrive())

    def _prefetch_forward(self, unit: UnitStep, actions: list[Action]) -> None:
        settings = unit.settings
        depth, named = settings.prefetch_depth, settings.forward_prefetch
        reach = depth + settings.copy_depth
        orders = self.orders
        if self._is_running:
            unit.position = orders.position
            following = orders.enter(unit, reach)
        else:
            unit.position = None
            following = orders.after(unit, reach)
        for target in following[:depth] if named is None else named:
            actions += target.prefetch()
        for target in following[depth:]:
            actions += target.copy()

    def _is_last_user(self, unit: UnitStep, user: object) -> bool:
        """Whether a unit's forward is over when a user's is."""
        if unit.phase is not Phase.FORWARD:  # somebody took its parameters away
            return False
        unit.users.discard(user)
        return not unit.users

    def _prefetch_backward(
        self, unit: UnitStep, actions: list[Action], position: int | None = None
    ) -> None:
        if self.is_in_turn:  # all that backward needs was gathered when it began
            return
        settings = unit.settings
        named, depth = settings.backward_prefetch, settings.prefetch_depth
        reach = depth + settings.copy_depth
        # The root's backward comes first, although its forward did too: it is around.
        is_root = unit in self.roots
        orders = self.orders
        then = orders.last(reach) if is_root else orders.before(unit, reach, position)
        for target in then[:depth] if named is None else named:
            if self._is_gathered_ahead(target):
                actions += target.prefetch()
        for target in then[depth:]:
            if self._is_gathered_ahead(target):
                actions += target.copy()

    def _is_gathered_ahead(self, unit: UnitStep) -> bool:
        """Whether backward may have a unit gathered before it comes to it."""
        # The root's backward has begun: if it is not held, backward needs no more of it.
        return unit.settings.gathers_in_backward and unit not in self.roots

    def _is_over(self, unit: UnitStep) -> bool:
        """Whether this backward comes to a unit no more: it has left every run there is."""
        is_left = [run.left_in == self._num_backwards for run in unit.runs]
        return bool(is_left) and all(is_left) and not unit.open_runs

    def _gather_for_next(self, position: int | None, unit: UnitStep, actions: list[Action]) -> None:
        """Gather what the backward that comes next is about to gather ahead.

        Before the reduction of this one: compute waits for gathers first.
        """
        settings = unit.settings
        if settings.prefetches_late or settings.backward_prefetch is not None:
            return
        for following in self.orders.before(unit, position=position):
            is_on_its_way = following.phase is not Phase.SHARDED and following not in self.roots
            if is_on_its_way and not following.settings.prefetches_late:
                before = None if position is None else position - 1
                self._prefetch_backward(following, actions, before)

    def _reduce(
        self,
        unit: UnitStep,
        actions: list[Action],
        before: Callable[[UnitStep, list[Action]], None] | None = None,
    ) -> None:
        """Reduce a unit's gradients, if there are some, or keep them.

        `before` says what to launch before that, when gradients have given their memory back.
        """
        if not unit.settings.reduces:
            # Other ranks may have gradients of it: they have to count on the same ones later.
            if unit.has_grads or (unit.settings.reduces_unused and unit.is_trained):
                actions.append(unit.do(ActionKind.SUM))
            return
        if not (unit.has_grads or unit.waits_for_reduction):
            return
        actions.append(unit.do(ActionKind.TAKE))
        self._free(unit, actions)  # before memory is needed for the reduction
        while len(self._in_flight) >= unit.settings.max_reductions:
            actions.append(self._in_flight.popleft().do(ActionKind.FINISH))
        actions.append(unit.do(ActionKind.PACK))
        if before is not None:
            before(unit, actions)
        actions.append(unit.do(ActionKind.REDUCE))
        unit.is_reduced = True
        self._in_flight.append(unit)

    def _free(self, unit: UnitStep, actions: list[Action]) -> None:
        """Backward is done with a unit."""
        if unit.phase is not Phase.BACKWARD:
            return
        if unit.settings.reshards_after_backward and not unit.is_in_graph:
            actions += unit.release()
        else:
            unit.phase = Phase.HELD
            actions.append(unit.do(ActionKind.REST))

    def _settle(self, unit: UnitStep, actions: list[Action]) -> None:
        """The backward is over: leave a unit as its settings say."""
        if unit.phase is Phase.BACKWARD:
            self._free(unit, actions)
        elif unit.phase is Phase.FORWARD and self._is_running:
            pass  # it asked for gradients inside of its forward, which goes on
        elif unit.phase is Phase.HELD and unit.is_in_graph:
            pass
        elif unit.phase is Phase.GATHERING and unit.is_in_graph:
            actions.append(unit.arrive())  # held, as on ranks whose backward came to it
        elif unit.settings.reshards_after_backward:
            actions += unit.release()
        elif unit.phase is Phase.GATHERING and self.is_in_turn:
            actions.append(unit.arrive())  # held, as on ranks whose backward came to it
        elif unit.phase is not Phase.HELD:
            actions += unit.release()

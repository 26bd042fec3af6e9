"""Where one unit is in its step, and the moves that concern it alone."""

from __future__ import annotations

import weakref
from typing import Any

from shoal.step.action import UNDONE, Action, ActionKind, Actions
from shoal.step.phase import Phase
from shoal.step.settings import Settings

_BEFORE = {
    ActionKind.GATHER: Phase.SHARDED,
    ActionKind.WAIT: Phase.GATHERING,
    ActionKind.FORWARD: Phase.HELD,
    ActionKind.BACKWARD: Phase.HELD,
    ActionKind.FREE: Phase.HELD,
    ActionKind.KEEP: Phase.HELD,
    ActionKind.CANCEL: Phase.GATHERING,
}
"""In which phase a unit is whose action did not happen."""


class ModuleRun:
    """One run of a unit's module: its backward begins at the outputs and ends at the inputs."""

    __slots__ = ("__weakref__", "is_borrowed", "left_in", "position", "version")

    def __init__(
        self, version: object = None, position: int | None = None, *, is_borrowed: bool = False
    ) -> None:
        self.version = version
        """The parameters' version in forward."""
        self.position = position
        """As which unit of its forward it ran, if it ran in the model's."""
        self.is_borrowed = is_borrowed
        """Whether the module is another one than the unit's, with which it shares parameters."""
        self.left_in = 0
        """The number of the backward that has left it last."""


class UnitStep:
    """What the machine knows of a unit."""

    def __init__(self, owner: Any, name: str = "") -> None:
        self.owner = owner
        """Whatever the executor performs actions on."""
        self.name = name or str(owner)
        self.settings = Settings()
        self.phase = Phase.SHARDED
        self.is_trained = True
        """Whether it has parameters that get gradients."""
        self.is_borrowed = False
        """Whether modules of other units use some of its parameters, and gather it for that."""
        self.has_grads = False
        """Whether autograd has put gradients on its full parameters; said before moments that
        may reduce it."""
        self.has_sums = False
        """Whether gradients of earlier backwards wait to be reduced."""
        self.keeps_piece = False
        """Whether something is kept of it between forward and backward, to gather from."""
        self.is_stashed = False
        """Whether that is all that there is of it now."""
        self.copies_first = False
        """Whether its shards lie where gathers cannot send them from."""
        self.is_copied = False
        """Whether a copy of them is there, or on its way, that no gather has read."""
        self.is_kept = False
        """Whether the user asked for the full parameters, and has not given them back."""
        self.is_lent = False
        """Whether a `full_parameters` block has them: then state dicts show them, not shards."""
        self.is_in_graph = False
        """Whether a graph of gradients may read its full parameters: it comes past all modules."""
        self.stays = False
        """Whether it is held after forward, also where no backward follows."""
        self.users: set[object] = set()
        """Whose forwards compute with it now, where parameters are shared by several modules."""
        self.position: int | None = None
        """As which unit of this forward it began to compute."""
        self.open_runs: set[ModuleRun] = set()
        """Those that backward has come to and not left."""
        self.runs: weakref.WeakSet[ModuleRun] = weakref.WeakSet()
        """All that some backward may come to; noted where units are reduced in turn."""
        self.is_entered = False
        """Whether this backward has come to the unit."""
        self.has_late_grads = False
        """Whether gradients came when the unit was not in its backward."""
        self.is_reduced = False
        """Whether this backward has reduced something already."""
        self._actions = {kind: Action(kind, self) for kind in ActionKind}

    def __repr__(self) -> str:
        return f"UnitStep({self.name!r}, {self.phase})"

    def do(self, kind: ActionKind) -> Action:
        """The action of a kind; made once."""
        return self._actions[kind]

    @property
    def is_bare(self) -> bool:
        """Whether there is nothing of it but shards."""
        return self.phase is Phase.SHARDED and not (self.is_stashed or self.is_copied)

    @property
    def waits_for_reduction(self) -> bool:
        """Whether the end of a backward has to reduce though no gradient came in it."""
        settings = self.settings
        unused = settings.reduces_unused and not self.is_reduced and self.is_trained
        return settings.reduces and (self.has_sums or unused)

    # What users may ask for at any moment, also before there is a model.

    def prefetch(self) -> Actions:
        """Start its gather, unless it is there or on its way."""
        return (*self.copy(), self.launch()) if self.phase is Phase.SHARDED else ()

    def copy(self) -> Actions:
        """Start copying its shards for a gather to come, unless none is to come or needs it."""
        if not self.copies_first or self.is_copied or self.is_stashed:
            return ()
        if self.phase is not Phase.SHARDED:
            return ()
        self.is_copied = True
        return (self.do(ActionKind.COPY),)

    def discard_copy(self) -> Actions:
        """Give up a copy that no gather has read."""
        if not self.is_copied:
            return ()
        self.is_copied = False
        return (self.do(ActionKind.DISCARD),)

    def hold(self) -> Actions:
        """Have its full parameters, from whatever phase this is."""
        actions = self.prefetch()
        if self.phase is Phase.GATHERING:
            actions += (self.arrive(),)
        return (*actions, self.do(ActionKind.REST)) if self.phase is Phase.HELD else actions

    def release(self) -> Actions:
        """Let go of its full parameters, from whatever phase this is."""
        self.is_kept = self.is_in_graph = False
        phase = self.phase
        if phase is Phase.SHARDED:
            actions = self.discard_copy()
            if not self.is_stashed:
                return actions
            self.is_stashed = False
            return (*actions, self.do(ActionKind.DROP))
        self.phase = Phase.SHARDED
        self.is_stashed = False
        return (self.do(ActionKind.CANCEL if phase is Phase.GATHERING else ActionKind.FREE),)

    # Single moves, of which the machine's answers are made.

    def launch(self) -> Action:
        """SHARDED → GATHERING."""
        self.phase = Phase.GATHERING
        self.is_copied = False
        return self.do(ActionKind.GATHER)

    def arrive(self) -> Action:
        """GATHERING → HELD."""
        self.phase = Phase.HELD
        return self.do(ActionKind.WAIT)

    def begin(self, phase: Phase) -> Action:
        """HELD → FORWARD or BACKWARD."""
        self.phase = phase
        return self.do(ActionKind.FORWARD if phase is Phase.FORWARD else ActionKind.BACKWARD)

    def stash(self) -> Action:
        """HELD → SHARDED, between forward and backward."""
        self.phase = Phase.SHARDED
        self.is_stashed = self.keeps_piece
        return self.do(ActionKind.KEEP if self.keeps_piece else ActionKind.FREE)

    def reset(self) -> None:
        """There is nothing of it but shards, whatever was going on; settings stay."""
        self.phase = Phase.SHARDED
        self.has_grads = self.has_sums = self.keeps_piece = self.is_stashed = False
        self.is_kept = self.is_lent = self.stays = self.is_copied = False
        self.runs.clear()
        self.forget_backward()

    def forget_backward(self) -> None:
        """What was noted of a backward that is over."""
        self.open_runs.clear()
        self.is_entered = self.has_late_grads = self.is_reduced = False


def undo(actions: Actions) -> None:
    """The first of these raised: units are again where they were before what did not happen."""
    for action in reversed(actions[0 if actions[0].kind in UNDONE else 1 :]):
        if action.kind is ActionKind.COPY:
            action.unit.is_copied = False
        before = _BEFORE.get(action.kind)
        if before is not None:
            action.unit.phase = before

"""An executor that only keeps account: it refuses actions that real memory could not do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shoal.step.action import Action, ActionKind
from shoal.step.phase import Phase
from shoal.step.unit_step import UnitStep

TRANSITIONS = {
    ActionKind.GATHER: (Phase.SHARDED, Phase.GATHERING),
    ActionKind.WAIT: (Phase.GATHERING, Phase.HELD),
    ActionKind.CANCEL: (Phase.GATHERING, Phase.SHARDED),
    ActionKind.FREE: (Phase.HELD, Phase.SHARDED),
    ActionKind.KEEP: (Phase.HELD, Phase.SHARDED),
}
"""What an action does to the memory of full parameters: HELD is there, whoever computes."""


@dataclass
class Account:
    """The memory and the gradients of one unit."""

    memory: Phase = Phase.SHARDED
    has_piece: bool = False
    has_copy: bool = False
    """Whether shards were copied from the host, and no gather has read them."""
    num_copies: int = 0
    """How many copies take memory: the one that waits, and one that a gather reads."""
    grads: int = 0
    """How many gradients are on the full parameters."""
    taken: int | None = None
    packed: int | None = None
    sums: int = 0
    """How many wait for a later reduction."""
    reduced: int = 0
    """How many reached the shards."""


@dataclass
class Ledger:
    """Performs actions on accounts."""

    accounts: dict[UnitStep, Account]
    log: list[str] = field(default_factory=list)
    in_flight: list[tuple[UnitStep, int]] = field(default_factory=list)
    refused: list[Action] = field(default_factory=list)

    def perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.log.append(str(action))
            self._perform(action.kind, action.unit)

    def _perform(self, kind: ActionKind, unit: UnitStep) -> None:
        account = self.accounts[unit]
        if kind in TRANSITIONS:
            before, after = TRANSITIONS[kind]
            assert account.memory is before, self.log
            account.memory = after
        match kind:
            case ActionKind.COPY:
                assert unit.copies_first, self.log
                assert account.memory is Phase.SHARDED, self.log
                assert not account.has_copy, f"copied twice: {self.log}"
                assert not account.has_piece, f"copied in vain: {self.log}"
                account.has_copy = True
                account.num_copies += 1
                assert account.num_copies == 1, self.log
            case ActionKind.DISCARD:
                assert account.has_copy, self.log
                account.has_copy, account.num_copies = False, 0
            case ActionKind.GATHER:
                needed = unit.copies_first and not account.has_piece
                assert account.has_copy or not needed, f"a copy is missing: {self.log}"
                account.has_copy = False
            case ActionKind.WAIT:
                account.num_copies = 0
            case ActionKind.WAKE | ActionKind.REST | ActionKind.FORWARD | ActionKind.BACKWARD:
                assert account.memory is Phase.HELD, self.log
            case ActionKind.KEEP:
                account.has_piece = True
            case ActionKind.FREE | ActionKind.CANCEL:
                account.has_piece = False
                account.num_copies = 0
            case ActionKind.DROP:
                assert account.has_piece, self.log
                account.has_piece = False
            case ActionKind.FOLLOW:  # it looks for shards where a piece would be
                assert account.memory is Phase.SHARDED, self.log
                assert not account.has_piece, self.log
            case ActionKind.TAKE:
                assert account.taken is None, self.log
                account.taken, account.grads = account.grads, 0
            case ActionKind.SUM:
                account.sums += account.grads
                account.grads = 0
                unit.has_sums = account.sums > 0
            case ActionKind.PACK:
                assert account.taken is not None, self.log
                assert account.packed is None, self.log
                assert len(self.in_flight) < unit.settings.max_reductions, self.log
                account.packed = account.taken + account.sums
                account.taken, account.sums, unit.has_sums = None, 0, False
            case ActionKind.REDUCE:
                assert account.packed is not None, self.log
                assert len(self.in_flight) < unit.settings.max_reductions, self.log
                self.in_flight.append((unit, account.packed))
                account.packed = None
            case ActionKind.FINISH:
                first, num = self.in_flight.pop(0)
                assert first is unit, self.log
                account.reduced += num
            case ActionKind.PLACE:
                assert not self.in_flight, self.log
            case ActionKind.REFUSE_BLIND | ActionKind.REFUSE_CHANGED:
                self.refused.append(Action(kind, unit))
            case _:
                pass

    def note_grads(self) -> None:
        """Say what the machine is told before moments that may reduce."""
        for unit, account in self.accounts.items():
            unit.has_grads = account.grads > 0

    def check_phases(self) -> None:
        """The machine's idea of memory is what there is."""
        for unit, account in self.accounts.items():
            held = unit.phase not in (Phase.SHARDED, Phase.GATHERING)
            assert account.memory is (Phase.HELD if held else unit.phase), self.log
            assert unit.is_stashed <= account.has_piece, self.log
            assert unit.is_copied == account.has_copy, self.log

"""Versions: which state of the training each rank can go back to, so that all can agree on one.

A step makes version v + 1 of the state out of version v. A rank that dies takes its gradients with
it, so a step that others have finished cannot be finished for it: it is undone instead. What every
rank does, in this order, and what it has then (live state, kept copy, parities):

    apply      the optimizer has run                         live v+1, copy v,   parity v
    protect    the parity of v+1 is there, beside that of v  live v+1, copy v,   parities v, v+1
    confirm    all ranks have the parity of v+1              the same, and it is known
    keep       the copy becomes that of the live state       live v+1, copy v+1, parities v, v+1
    apply      …                                             live v+2, copy v+1, parity v+1

Nobody overwrites version v, neither its copy nor its parity, before `confirm` of v + 1. So after a
death the least of the survivors' newest whole parities is a version that all of them have, in the
live state or as the copy, with its parity. `confirm` needs no barrier of its own: the question can
be asked when a parity is done, and its answer is needed only when the next step is applied.

This is the protocol alone, for one rank: no tensors, no communication.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from shoal.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a survivor can offer: it says so after a death, before anything is decided."""

    live: int | None
    """The version of the live state; None while an optimizer is writing it."""
    kept: int | None
    """The version of the copy; None while it is written, or where there is none."""
    whole: int
    """The newest version whose parity is whole here."""


def agreed(offers: Iterable[Offer]) -> int:
    """The version that all survivors go back to."""
    return min(offer.whole for offer in offers)


class StateSource(Enum):
    """Where a rank finds an agreed version."""

    LIVE = auto()
    KEPT = auto()


class Versions:
    """What one rank has of the last two versions, and what it may overwrite."""

    def __init__(self, version: int = 0) -> None:
        self.begin(version)

    def begin(self, version: int) -> None:
        """Start with a state that is live on all ranks, before its first parity."""
        self._live: int | None = version
        self._newest = version
        self._kept: int | None = None
        self._whole: int | None = None
        self._confirmed: int | None = None

    def go_back(self, version: int) -> None:
        """Have nothing but the copy and the parity of a version that all have agreed on."""
        self._expect(self.has_parity_of(version), f"go back to version {version} from", "here")
        self._live = None
        self._newest = self._kept = self._whole = self._confirmed = version

    @property
    def newest(self) -> int:
        """The version of the live state, or the one that an optimizer is about to make."""
        return self._newest

    @property
    def is_protected(self) -> bool:
        """Whether the newest version has a parity on all ranks, as far as this rank knows."""
        return self._confirmed == self._newest

    @property
    def may_apply(self) -> bool:
        """Whether the optimizer may write: what it overwrites is kept and protected."""
        return self.is_protected and self._kept == self._newest

    def begin_keep(self) -> None:
        """The copy is about to be overwritten with the live state."""
        self._expect(self.is_protected, "overwrite the copy", "that is not known to be protected")
        self._expect(self._live == self._newest, "keep", "that is half written")
        self._kept = None

    def end_keep(self) -> None:
        """The copy is that of the live state."""
        self._kept = self._newest

    def begin_apply(self) -> None:
        """The optimizer is about to write the live state."""
        self._expect(self.may_apply, "apply a step to", "of which no protected copy is kept")
        self._live = None
        self._newest += 1

    def end_apply(self) -> None:
        """The optimizer has written a new version."""
        self._live = self._newest

    def slot_of(self, version: int) -> int:
        """Which of the two places for parities a version has: that of two versions ago."""
        return version % 2

    def protect(self) -> None:
        """The parity of the newest version is whole on this rank."""
        self._expect(self._live == self._newest, "protect", "that is half written")
        self._whole = self._newest

    def confirm(self) -> None:
        """All ranks have said that the parity of the newest version is whole."""
        self._expect(self._whole == self._newest, "confirm", "whose parity is not whole here")
        self._confirmed = self._newest

    @property
    def offer(self) -> Offer | None:
        """What this rank can offer; None before its first parity is whole."""
        if self._whole is None:
            return None
        return Offer(live=self._live, kept=self._kept, whole=self._whole)

    def source_of(self, version: int) -> StateSource:
        """Where this rank has an agreed version of its state."""
        if self._live == version:
            return StateSource.LIVE
        if self._kept == version:
            return StateSource.KEPT
        raise InvariantError(
            f"the ranks agreed on version {version}, but this one has version {self._live} live "
            f"and {self._kept} as its copy"
        )

    def has_parity_of(self, version: int) -> bool:
        """Whether the parity of a version is whole here, and not overwritten."""
        return self._whole is not None and version in (self._whole, self._whole - 1)

    def _expect(self, holds: bool, what: str, why: str) -> None:
        if not holds:
            raise InvariantError(f"cannot {what} version {self._newest} {why}")

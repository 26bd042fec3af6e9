"""The order in which wrappers run, which must be the same on all ranks: a gather is a collective.

| when | compared | if it differs |
|---|---|---|
| a wrapper's first forward | with the other ranks, through the store | raises on all ranks |
| later, with `TORCH_DISTRIBUTED_DEBUG=DETAIL` | with this rank's first iteration | warns once |
"""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch.distributed as dist

from shoal.runtime.guard import check_order_agrees
from shoal.runtime.unit import Unit

_IN_FIRST_FORWARD = timedelta(minutes=5)
_LATER = timedelta(minutes=1)
"""How long ranks wait for one another. They were together before a later forward."""


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

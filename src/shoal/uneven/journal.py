"""What a rank with inputs does, for the ranks that shadow it: written to the store, and read there.

An entry is written before what it tells of can wait for other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from shoal.errors import RankError
from shoal.uneven.meeting import PATIENCE, Meetings

Entry = dict[str, Any]
"""One thing that happened: plain values alone, since whoever writes to the store is not trusted."""

_END: Entry = {"kind": "meeting"}
"""The ranks meet: what follows is written by whoever leads then."""


class StepJournal:
    """The entries between two meetings, by one of the ranks that goes on."""

    def __init__(self, meetings: Meetings) -> None:
        self._meetings = meetings
        self._store = meetings.store
        self._unsent: list[Entry] = []
        self._written: list[str] = []
        self._num_sent = 0

    def begin(self) -> None:
        """A meeting is over: entries come to another place; nobody reads the last ones again."""
        for key in self._written:
            self._store.delete_key(key)
        self._written, self._num_sent = [], 0

    def add(self, entry: Entry, *, at_once: bool) -> None:
        """Write an entry, with those before it, or keep it for the next time."""
        self._unsent.append(entry)
        if at_once:
            key = self._key(self._num_sent)
            self._store.set(key, json.dumps(self._unsent))
            self._written.append(key)
            self._num_sent += 1
            self._unsent = []

    def end(self) -> None:
        """The ranks are about to meet."""
        self.add(_END, at_once=True)

    def read(self) -> Iterator[Entry]:
        """The entries of another rank, as it writes them."""
        number = 0
        while True:
            key = self._key(number)
            try:
                self._store.wait([key], PATIENCE)
            except dist.DistStoreError as error:
                raise RankError(
                    "shoal.join: the rank that still had inputs has said nothing for "
                    f"{PATIENCE}. Look at what it is doing."
                ) from error
            for entry in json.loads(self._store.get(key)):
                if entry == _END:
                    return
                yield entry
            number += 1

    def _key(self, number: int) -> str:
        return f"{self._meetings.key}/{self._meetings.number}/{number}"

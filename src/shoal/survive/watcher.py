"""The watcher: a thread that reads the log of events, and cuts groups whose members are gone."""

from __future__ import annotations

import threading
from contextlib import suppress

from shoal.survive.generation import Generation, StoreAddress
from shoal.survive.roster import EventKind, EventLog

_POLL_S = 0.02


class Watcher:
    """Reads the log over a connection of its own, as long as the `with` block lasts."""

    def __init__(self, address: StoreAddress) -> None:
        self._store = address.connect()
        self._log = EventLog(self._store)
        self._lost: set[int] = set()
        self._generation: Generation | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-survive", daemon=True)
        self.num_events = 0
        """How many events were read."""
        self.is_alone = False
        """Whether the store is gone, and with it the launcher: nobody can be missed any more."""

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def watch(self, generation: Generation | None) -> None:
        """From now on, cut this generation when one of its members is lost."""
        with self._lock:
            self._generation = generation
        self._look()

    def has_lost(self, members: tuple[int, ...]) -> bool:
        """Whether one of these members is gone."""
        with self._lock:
            return not self._lost.isdisjoint(members)

    def _run(self) -> None:
        while not self._end.wait(_POLL_S):
            try:
                new = self._log.read()
            except RuntimeError:
                self.is_alone = True
                self._look()
                return
            with self._lock:
                self._lost.update(e.member for e in new if e.kind is EventKind.LOST)
                self.num_events += len(new)
            self._look()

    def _look(self) -> None:
        with self._lock:
            generation = self._generation
            if generation is None:
                return
            is_hit = self.is_alone or not self._lost.isdisjoint(generation.members)
        if is_hit:
            with suppress(OSError):
                generation.cut()  # again and again: one that is being formed connects anew

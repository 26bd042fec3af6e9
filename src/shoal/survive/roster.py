"""Who trains: a log of losses and arrivals, and for each generation of groups one decision.

Everything is in a store that lives outside of every rank, in the launcher, so any rank may die:

    events/0, events/1, …     what happened to whom, in order; ranks only read it
    offers/<g>/<member>       what a member could go on from, if generation g were formed now
    decisions/<g>             who forms generation g, and from which version; the first one counts
    arrivals/<member>         a process that started late says that it is ready to join

Ranks are renumbered with each generation; a member keeps its number as long as it lives, and nobody
else ever gets it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Protocol


class KeyValues(Protocol):
    """What is needed of a store, such as torch's `TCPStore`."""

    def set(self, key: str, value: str) -> object:
        """Put a value."""
        ...

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Tell whether all keys are there, without waiting."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Put a value unless there is one; returns the one that is there then."""
        ...


class EventKind(StrEnum):
    """What can happen to a member."""

    LOST = "lost"
    JOINED = "joined"
    LEAVES = "leaves"
    """It is asked to go, between steps: a resize to fewer ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a member."""

    kind: EventKind
    member: int


class EventLog:
    """The events so far, as one process has read them."""

    def __init__(self, store: KeyValues) -> None:
        self._store = store
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        """Read on; returns what is new."""
        start = len(self.events)
        while self._store.check([key := f"events/{len(self.events)}"]):
            fields = json.loads(self._store.get(key))
            self.events.append(Event(kind=EventKind(fields["kind"]), member=fields["member"]))
        return self.events[start:]

    def post(self, event: Event) -> None:
        """Add an event; of several writers each has a place of its own."""
        text = json.dumps(asdict(event))
        place = len(self.events)
        while self._store.compare_set(f"events/{place}", "", text).decode() != text:
            place += 1


def members_after(initial: int, events: Iterable[Event]) -> tuple[int, ...]:
    """Who trains after some events, when the ranks 0 to `initial` - 1 have begun."""
    members = dict.fromkeys(range(initial))
    for event in events:
        if event.kind is EventKind.JOINED:
            members[event.member] = None
        else:
            members.pop(event.member, None)
    return tuple(members)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footing:
    """State that a member has kept, protected by the ranks of a generation."""

    generation: int
    whole: int
    """The newest version whose parity is whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Who forms a generation, and from what."""

    members: tuple[int, ...]
    """By their ranks."""
    num_events: int
    """How many events of the log it takes into account."""
    footing: Footing | None
    """The generation whose shards and parity it starts from, and the version; None: from nothing,
    since too much is lost."""

    def to_json(self) -> str:
        """As text, for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Decision:
        """Read what `to_json` wrote."""
        fields = json.loads(text)
        footing = fields["footing"]
        return cls(
            members=tuple(fields["members"]),
            num_events=fields["num_events"],
            footing=None if footing is None else Footing(**footing),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Protected:
    """What everybody knows of a generation: who protects whom, and how many may be lost."""

    members: tuple[int, ...]
    num_parities: int


def choose(
    offers: Mapping[int, Sequence[Footing]],
    generations: Mapping[int, Protected],
    members: Sequence[int],
    num_events: int,
) -> Decision:
    """The best that some members can go on from: the newest generation that can be rebuilt.

    A generation counts if all of its members that are left offer it, which they do from its first
    parity on and until all know of the first parity of a later one.
    """
    chosen: Footing | None = None
    for number in sorted(generations, reverse=True):
        protected = generations[number]
        left = [member for member in protected.members if member in members]
        offered = [
            footing
            for member in left
            for footing in offers.get(member, ())
            if footing.generation == number
        ]
        num_lost = len(protected.members) - len(left)
        if left and len(offered) == len(left) and num_lost <= protected.num_parities:
            chosen = Footing(generation=number, whole=min(footing.whole for footing in offered))
            break
    return Decision(members=tuple(members), num_events=num_events, footing=chosen)


class Roster:
    """The members of a job, as one of them takes part in decisions."""

    def __init__(self, store: KeyValues, log: EventLog, member: int, initial: int) -> None:
        self._store = store
        self._initial = initial
        self.log = log
        self.member = member

    @property
    def members(self) -> tuple[int, ...]:
        """Who trains, as far as the log has been read."""
        return members_after(self._initial, self.log.events)

    def offer(self, generation: int, footings: Sequence[Footing]) -> None:
        """Say what this member could start a generation from."""
        text = json.dumps([asdict(footing) for footing in footings])
        self._store.set(f"offers/{generation}/{self.member}", text)

    def decided(self, generation: int) -> Decision | None:
        """What was decided about a generation, if anything."""
        key = f"decisions/{generation}"
        if not self._store.check([key]):
            return None
        return Decision.from_json(self._store.get(key))

    def try_to_decide(
        self, generation: int, generations: Mapping[int, Protected]
    ) -> Decision | None:
        """Decide who forms a generation once all who are alive have made an offer.

        Whoever is first decides for all. Members that die later are missed when it is formed.
        """
        decided = self.decided(generation)
        if decided is not None:
            return decided
        self.log.read()
        members = self.members
        keys = {member: f"offers/{generation}/{member}" for member in members}
        if not members or not self._store.check(list(keys.values())):
            return None
        offers = {
            member: [Footing(**fields) for fields in json.loads(self._store.get(key))]
            for member, key in keys.items()
        }
        proposed = choose(offers, generations, members, len(self.log.events))
        text = self._store.compare_set(f"decisions/{generation}", "", proposed.to_json())
        return Decision.from_json(text)

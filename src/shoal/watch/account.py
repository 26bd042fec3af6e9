"""One rank's account when ranks do not meet: the collectives it launched, and where it is."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from dataclasses import asdict, dataclass, field

from shoal.watch.log import LoggedCollective

_NUM_FRAMES = 4
_NOT_TELLING = ("/shoal/comm/", "/torch/", "/threading.py")
"""Files of code that waits: every rank that waits is there, so they tell nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One rank's account."""

    rank: int
    entries: tuple[LoggedCollective, ...] = ()
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of each group that it used."""
    counts: dict[str, int] = field(default_factory=dict)
    """How many collectives torch has counted in each group: also those that are no entries."""
    waits_for: str = ""
    waited_s: float = 0.0
    stack: tuple[str, ...] = ()
    """Where its main thread is, innermost first."""
    is_silent: bool = False
    """Whether it did not answer, so that this is all that is known of it."""

    def to_json(self) -> str:
        """The account as text for another rank."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Account:
        """The account that another rank sent."""
        fields = json.loads(text)
        fields["entries"] = tuple(LoggedCollective(**entry) for entry in fields["entries"])
        fields["groups"] = {name: tuple(ranks) for name, ranks in fields["groups"].items()}
        fields["stack"] = tuple(fields["stack"])
        return cls(**fields)


def stack_of_main_thread() -> tuple[str, ...]:
    """The main thread's innermost frames of code that does more than wait."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ()
    frames = [
        entry
        for entry in reversed(traceback.extract_stack(frame))
        if not any(part in entry.filename for part in _NOT_TELLING)
    ]
    return tuple(
        f"{'/'.join(entry.filename.split('/')[-2:])}:{entry.lineno} {entry.name}"
        for entry in frames[:_NUM_FRAMES]
    )

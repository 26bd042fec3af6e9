"""A program: a model, how it is sharded, and the moments of a user's script in a row."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from programs.moments import Moment
from programs.twins import Setup, Twins


@dataclass(frozen=True, slots=True)
class Program:
    """What a script does."""

    setup: Setup
    moments: list[Moment]

    def run(self) -> None:
        """Run it on this rank, and compare after each moment."""
        # Dynamo looks at `.grad` of what it is given, and hides what torch says to that only from
        # those who print warnings, not from those who raise them.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        twins = Twins(self.setup)
        for number, moment in enumerate(self.moments):
            with _named(f"moment {number}, {moment}, of {self}"):
                moment.run(twins)
                twins.check()


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise

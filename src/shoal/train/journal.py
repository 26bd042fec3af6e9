"""The journal: what a run says of itself while it runs, and who hears it.

Rank 0's journal has listeners (the metrics file, the display, TensorBoard, the timeline); the
journals of the other ranks have none, so the loop talks to its journal without asking who it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

from shoal.errors import ShoalError
from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.runtime.events import Event


class Listener(Protocol):
    """Something that hears what happens in a run."""

    def on_step(self, record: StepRecord, events: Sequence[Event]) -> None:
        """A step has been taken; `events` are what rank 0's engine did in it."""
        ...

    def on_validation(self, record: ValidationRecord) -> None:
        """The loss on held-out text has been measured."""
        ...

    def on_note(self, text: str) -> None:
        """Something that a person wants to know."""
        ...

    def close(self) -> None:
        """Nothing more will happen."""
        ...


class Journal:
    """Passes on what happens to every listener."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self._listeners = tuple(listeners)

    def step(self, record: StepRecord, events: Sequence[Event]) -> None:
        """Tell that a step has been taken."""
        for listener in self._listeners:
            listener.on_step(record, events)

    def validation(self, record: ValidationRecord) -> None:
        """Tell the loss on held-out text."""
        for listener in self._listeners:
            listener.on_validation(record)

    def note(self, text: str) -> None:
        """Tell something that a person wants to know."""
        for listener in self._listeners:
            listener.on_note(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with ExitStack() as closing:
                for listener in self._listeners:
                    closing.callback(listener.close)
        except (OSError, ShoalError):
            if error is None:  # else the first error tells more than its echo
                raise

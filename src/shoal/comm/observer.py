"""Who watches the collectives of this process: nobody, unless a watchdog was started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.errors import RankError, ShoalError


class Observer(Protocol):
    """Hears of collectives before they can hang."""

    def launching(self, reason: str, group: ProcessGroup, tensor: Tensor) -> None:
        """A collective is about to start; it fills or changes `tensor`."""
        ...

    def waiting(self, reason: str) -> None:
        """The host begins to wait for other ranks."""
        ...

    def arrived(self) -> None:
        """It waits no longer."""
        ...

    def explained(self, failure: str) -> str:
        """Add to the text of a failure what the other ranks did meanwhile."""
        ...


current: Observer | None = None
"""Read by every collective, so it is a plain name and not a call."""


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let `observer` hear of all collectives of this process."""
    global current
    before, current = current, observer
    try:
        yield
    finally:
        current = before


@contextmanager
def timed(reason: str) -> Iterator[None]:
    """Let the observer know how long the host stands still inside of this."""
    observer = current
    if observer is None:
        yield
        return
    observer.waiting(reason)
    try:
        yield
    finally:
        observer.arrived()


@contextmanager
def waiting(reason: str) -> Iterator[None]:
    """Meet other ranks inside of this, where that is not done by a `Pending`."""
    observer = current
    with timed(reason):
        try:
            yield
        except (ShoalError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            text = f"{reason} failed while waiting for the other ranks: {error}"
            raise RankError(text if observer is None else observer.explained(text)) from error

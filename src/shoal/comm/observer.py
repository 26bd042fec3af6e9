"""Observers of the collectives of this process: none, unless asked for.

A watchdog keeps a log of them. With `SHOAL_DEBUG=collectives` ranks compare them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.comm.launch_comparison import LIMIT_S, LaunchComparison, is_wanted
from shoal.errors import RankError, ShoalError


class Observer(Protocol):
    """Hears of collectives before they can hang."""

    def launching(self, reason: str, group: ProcessGroup, tensor: Tensor | None) -> Any:
        """A collective is about to start; returns what `in_stream` knows it by.

        It fills or changes `tensor`; None where that has a size of its own on each rank.
        """
        ...

    def in_stream(self, launched: Any = None) -> None:
        """The current CUDA stream runs or waits for it, and the host does not.

        `launched` is what `launching` returned; None stands for the collective launched last.
        """
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
comparison: LaunchComparison | None = LaunchComparison() if is_wanted() else None
"""What compares collectives between ranks, if they are compared."""


_in_background: set[int] = set()
"""Threads of whose collectives nobody hears."""


def of_this_thread() -> Observer | None:
    """The observer, unless this thread communicates in the background."""
    if _in_background and threading.get_ident() in _in_background:
        return None
    return current


@contextmanager
def in_background() -> Iterator[None]:
    """Let nobody hear of this thread's collectives: their place among others' means nothing."""
    own = threading.get_ident()
    _in_background.add(own)
    try:
        yield
    finally:
        _in_background.discard(own)


def launching(reason: str, group: ProcessGroup, tensor: Tensor | None) -> Any:
    """Tell the observer of a collective that is about to start; every launch calls this.

    Returns what the observer knows it by; None if nobody observes.
    """
    if _in_background and threading.get_ident() in _in_background:
        return None
    if comparison is not None:
        with timed(f"the other ranks at {reason}"):
            comparison.check(reason, group, tensor)
    return None if current is None else current.launching(reason, group, tensor)


def run_in_stream(
    reason: str, group: ProcessGroup, output: Tensor, run: Callable[..., object], *args: object
) -> None:
    """Run a collective on the current CUDA stream, which the host does not wait for."""
    launching(reason, group, output)
    run(*args)
    if current is not None:
        current.in_stream()


def begin_step() -> None:
    """A model's forward begins."""
    if comparison is not None:
        comparison.step += 1


def comparing(limit_s: float = LIMIT_S) -> AbstractContextManager[None]:
    """Let the ranks compare every collective inside of this; all of them enter it."""
    return _comparing_by(LaunchComparison(limit_s))


def uncompared() -> AbstractContextManager[None]:
    """Compare nothing inside of this: for ranks that differ on purpose."""
    return _comparing_by(None)


@contextmanager
def _comparing_by(other: LaunchComparison | None) -> Iterator[None]:
    global comparison
    before, comparison = comparison, other
    try:
        yield
    finally:
        comparison = before


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

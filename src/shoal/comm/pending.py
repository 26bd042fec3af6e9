"""A collective before it runs, and while it does.

    Prepared  ── launch() ──>  Pending  ── wait() ──>  output

A collective is checked when it is prepared. A caller that runs the same one over the same tensors
every step prepares it once. Collectives start by `launch`, which tells the observer, or by
`observer.run_in_stream` if they run on the caller's CUDA stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.comm import observer
from shoal.errors import RankError, ShoalError


class Waitable(Protocol):
    """A collective in flight, such as c10d's `Work`."""

    def wait(self) -> object:
        """Wait for the collective."""
        ...


Started = tuple[Waitable | None, Callable[[], object] | None]
"""A launch: the work of the backend, and what is left to do on this rank when it is over."""


class _Works:
    """Several works that are waited for as one."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Waitable]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()


def together(started: Sequence[Started]) -> Started:
    """Several launches as one."""
    if len(started) == 1:
        return started[0]
    works = [work for work, _ in started if work is not None]
    finishes = [finish for _, finish in started if finish is not None]

    def finish() -> None:
        for one in finishes:
            one()

    return _Works(works) if works else None, finish if finishes else None


class Pending:
    """One collective in flight: its output, why it was asked for, and the wait for it.

    On CPU `wait` blocks the host. On CUDA it makes the *current stream* wait, so that stream may
    read the output afterwards and the host runs on. Waiting again is free; it does not order a
    second stream.
    """

    __slots__ = ("_finish", "_launched", "_work", "output", "reason")

    def __init__(
        self,
        output: Tensor,
        work: Waitable | None,
        reason: str,
        finish: Callable[[], object] | None = None,
        launched: object = None,
    ) -> None:
        self.output = output
        self.reason = reason
        self._launched = launched
        self._work = work
        self._finish = finish

    @property
    def waited(self) -> bool:
        """Whether somebody has waited for it already."""
        return self._work is None and self._finish is None

    def wait(self) -> Tensor:
        """Make the output readable here, and return it."""
        work, finish, watcher = self._work, self._finish, observer.of_this_thread()
        if work is not None:
            if watcher is not None:
                watcher.waiting(self.reason)
            try:
                work.wait()
            except ShoalError:
                raise
            except RuntimeError as error:
                text = f"{self.reason} failed while waiting for the other ranks: {error}"
                raise RankError(text if watcher is None else watcher.explained(text)) from error
            finally:
                if watcher is not None:
                    watcher.arrived()
            # Dropping it releases the buffers that the collective kept alive.
            self._work = None
        if finish is not None:
            self._finish = None
            with torch.no_grad():
                finish()
        if self._launched is not None:
            launched, self._launched = self._launched, None
            if watcher is not None and self.output.is_cuda:
                watcher.in_stream(launched)
        return self.output

    def __repr__(self) -> str:
        state = "done" if self.waited else "in flight"
        return f"Pending({self.reason}, {tuple(self.output.shape)}, {state})"


def launch(
    reason: str,
    group: ProcessGroup | None,
    output: Tensor,
    start: Callable[[], Started],
    *,
    same_size: bool = True,
) -> Pending:
    """Start a collective; observers hear of it before, unless it is in no group.

    `same_size` says that all ranks have an output of that size, so that they can compare.
    """
    launched = None
    if group is not None:
        launched = observer.launching(reason, group, output if same_size else None)
    try:
        work, finish = start()
    except (ShoalError, NotImplementedError):
        raise
    except RuntimeError as error:
        raise RankError(f"{reason} could not be started: {error}") from error
    return Pending(output, work, reason, finish, launched)


class Prepared:
    """A collective whose tensors were checked: it can be launched any number of times.

    It refers to its tensors, so their sizes, dtypes and devices must stay; their memory may move.
    """

    __slots__ = ("_group", "_start", "output", "reason")

    def __init__(
        self,
        output: Tensor,
        reason: str,
        start: Callable[[], Started],
        group: ProcessGroup | None = None,
    ) -> None:
        self.output = output
        self.reason = reason
        self._start = start
        self._group = group

    def launch(self) -> Pending:
        """Start it."""
        return launch(self.reason, self._group, self.output, self._start)

    def __repr__(self) -> str:
        return f"Prepared({self.reason}, {tuple(self.output.shape)})"

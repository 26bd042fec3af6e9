"""A save in the background: at most one for each group of ranks, and its error is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.checkpoint.agreement import Ranks
from shoal.errors import CheckpointError


class PendingSave:
    """A checkpoint that is being written while training goes on.

    `buffer` is the host memory that its copy lies in; the next save uses it again.
    """

    def __init__(
        self, folder: Path, ranks: Ranks, work: Callable[[], None], buffer: torch.Tensor
    ) -> None:
        self.folder = folder
        self.buffer = buffer
        self.ranks = ranks
        self._work = work
        self._error: BaseException | None = None
        self._is_settled = False
        self._thread = threading.Thread(target=self._run, name=f"save {folder.name}", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank has nothing more to do for it, be it published or failed."""
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raise the error if it has failed already; else return at once. Not collective.

        Call it once per step: all ranks learn of a failure, but maybe not in the same step. It
        is raised until `wait`, or the next save, has raised it on all ranks.
        """
        if self.done and self._error is not None and not self._is_settled:
            raise CheckpointError(f"saving {self.folder}: {self._error}") from self._error

    def wait(self) -> Path:
        """Return the folder when it is published; else raise the same error on all ranks.

        Collective. A failure is raised once.
        """
        if not self._is_settled:
            # All are here before anyone blocks: ranks of one process take turns, and the save of
            # one who waits needs the part of one whose turn has not come.
            self.ranks.exchange(None)
            self._thread.join()
            failures = self.ranks.exchange(_text(self._error))
            self._is_settled = True
            found = [text for text in failures if text is not None]
            if found:
                raise CheckpointError(f"saving {self.folder}: {found[0]}") from self._error
        return self.folder

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            # Nobody is above a thread: whoever waits for the save, or saves next, raises it.
            self._error = error
        finally:
            self._work = _nothing


def settle(ranks: Ranks) -> torch.Tensor | None:
    """Wait for the save in flight, if any, raise its error, and give its buffer. Collective."""
    pending = _last.get(ranks.key)
    # What a process group that is gone had in flight concerns nobody in this one.
    if pending is None or not pending.ranks.meets(ranks):
        return None
    pending.wait()
    return pending.buffer


def remember(ranks: Ranks, pending: PendingSave) -> None:
    """Let the next save of this rank and group find this one."""
    _last[ranks.key] = pending


_last: dict[tuple[int, str], PendingSave] = {}
"""By rank and group, because one process may be several ranks (`shoal.comm.local`)."""


def _nothing() -> None:
    """Take the place of work that is done, so that its tensors can go."""


def _text(error: BaseException | None) -> str | None:
    if error is None:
        return None
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"

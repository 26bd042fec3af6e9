"""A save in the background: a thread, and notes in storage in the place of collectives.

At most one is in flight for each group of ranks, and its error is not lost. It cannot use the
process group, which the training step is using. Every rank sees the storage anyway: in the
partial checkpoint it leaves a note that says what it wrote, or why it could not, and the first
rank collects the notes. Nobody leaves a note before its data is stored.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from shoal.checkpoint.data_files import WrittenFile
from shoal.checkpoint.manifest import (
    MAX_BYTES,
    decoded_file,
    decoded_region,
    dtype_name,
    encoded_file,
    encoded_region,
)
from shoal.checkpoint.ranks import Ranks, failure_text
from shoal.checkpoint.storage import Checkpoint
from shoal.errors import CheckpointError

Place = TypeVar("Place", bound="Path | Checkpoint")
"""A checkpoint as the caller named it."""

_POLL_S = 0.01


class PendingSave(Generic[Place]):
    """A checkpoint that is being written while training goes on.

    `buffer` is the host memory that its copy lies in; the next save uses it again.
    """

    def __init__(
        self, folder: Place, ranks: Ranks, work: Callable[[], None], buffer: torch.Tensor
    ) -> None:
        self.folder: Place = folder
        self.buffer = buffer
        self.ranks = ranks
        self._error: BaseException | None = None
        self._is_settled = False
        self._thread = threading.Thread(
            target=self._run, args=(work,), name=f"save {folder.name}", daemon=True
        )
        self._thread.start()
        _last[ranks.key] = self

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

    def wait(self) -> Place:
        """Return the checkpoint when it is published; else raise the same error on all ranks.

        Collective. A failure is raised once.
        """
        if not self._is_settled:
            # All are here before anyone blocks: ranks of one process take turns, and the save of
            # one who waits needs the part of one whose turn has not come.
            self.ranks.exchange(None)
            self._thread.join()
            failures = self.ranks.exchange(failure_text(self._error))
            self._is_settled = True
            found = [text for text in failures if text is not None]
            if found:
                raise CheckpointError(f"saving {self.folder}: {found[0]}") from self._error
        return self.folder

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            # Nobody is above a thread: `wait`, `check` or the next save raises it.
            self._error = error


def settle(ranks: Ranks) -> torch.Tensor | None:
    """Wait for the save in flight, if any, raise its error, and give its buffer. Collective."""
    pending = _last.get(ranks.key)
    # What a process group that is gone had in flight concerns nobody in this one.
    if pending is None or not pending.ranks.meets(ranks):
        return None
    pending.wait()
    return pending.buffer


_last: dict[tuple[int, str], PendingSave[Any]] = {}
"""The newest by rank and group, because one process may be several ranks (`shoal.comm.local`)."""


def leave_note(
    partial: Checkpoint, rank: int, written: WrittenFile | None, failure: str | None
) -> None:
    """Tell the first rank what this one wrote, or why it could not."""
    note: dict[str, object] = {"failure": failure}
    if written is not None:
        note["name"] = written.name
        note["file"] = encoded_file(written.file)
        note["regions"] = [
            [stored.name, dtype_name(stored.dtype), encoded_region(stored)]
            for stored in written.regions
        ]
    data = json.dumps(note).encode()
    partial.write(_note_name(rank), [data], len(data))


def collect_notes(partial: Checkpoint, world_size: int, timeout_s: float) -> list[WrittenFile]:
    """Wait for the notes of all ranks, remove them, and say what is in the checkpoint."""
    deadline = time.monotonic() + timeout_s
    found: list[WrittenFile] = []
    for rank in range(world_size):
        note = _awaited(
            lambda rank=rank: _read_note(partial, rank),
            deadline,
            f"rank {rank} did not write its part of {partial} in {timeout_s:g} s: it died, is "
            "slow, or does not see this file system",
        )
        partial.remove(_note_name(rank))
        if note["failure"] is not None:
            raise CheckpointError(f"rank {rank}: {note['failure']}")
        if "file" in note:
            file = decoded_file(note["file"])
            regions = tuple(decoded_region(*fields) for fields in note["regions"])
            found.append(WrittenFile(name=note["name"], file=file, regions=regions))
    return found


def await_outcome(partial: Checkpoint, checkpoint: Checkpoint, timeout_s: float) -> None:
    """Wait until the first rank has published the checkpoint, or given it up, which raises."""
    _awaited(
        lambda: not partial.exists(),
        time.monotonic() + timeout_s,
        f"rank 0 did not publish {checkpoint} in {timeout_s:g} s: it died, is slow, or waits",
    )
    if not checkpoint.exists():
        raise CheckpointError(f"{checkpoint} was not saved; rank 0 knows why")


def _read_note(partial: Checkpoint, rank: int) -> dict[str, Any] | None:
    """Give a note that is there as a whole: one that is still written ends too early for JSON."""
    if not partial.exists(_note_name(rank)):
        return None
    try:
        return json.loads(partial.read_whole(_note_name(rank), MAX_BYTES))
    except ValueError:
        return None


Found = TypeVar("Found")


def _awaited(ask: Callable[[], Found | None], deadline: float, message: str) -> Found:
    while not (found := ask()):
        if time.monotonic() > deadline:
            raise CheckpointError(message)
        time.sleep(_POLL_S)
    return found


def _note_name(rank: int) -> str:
    return f"rank-{rank:05d}.note"

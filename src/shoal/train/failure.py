"""How a rank's failure travels: written by the rank, read by the launcher, told as one error.

A rank that raises writes a reply file in the form that torch's elastic agent reads, with fields
of our own. A rank that is killed writes nothing; its exit status says it. When one rank fails the
others soon fail of its absence, so the launcher looks for the one that came first; a rank that the
launcher ended itself is never the one.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal import errors
from shoal.checkpoint import latest
from shoal.errors import CheckpointError, DivergedError, RankError, ShoalError, UsageError
from shoal.train import environment
from shoal.train.checkpoints import step_of
from shoal.train.run_folder import RunFolder
from shoal.watch import post_mortem

SHARED_ERRORS = (UsageError, CheckpointError, DivergedError)
"""Errors that every rank meets alike, from what all share: one message says it for all."""

_HINTS: dict[int, str] = {
    signal.SIGKILL: "Someone killed it, or the system was out of memory.",
    signal.SIGSEGV: "A library crashed in native code.",
    signal.SIGBUS: "A library crashed in native code, or shared memory (/dev/shm) is full.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How the process of a rank ended."""

    rank: int
    pid: int
    status: int
    """As `subprocess` tells it: a signal's number is negative."""
    reply: Mapping[str, Any] = field(default_factory=dict)
    """The reply file of the rank; empty if it could not write one."""
    is_lost: bool = True
    """Whether it ended by itself and too early; else it had finished, or the launcher ended it."""
    was_stopped: bool = False
    """Whether it stood still when the launcher ended it."""

    def __str__(self) -> str:
        return f"rank {self.rank} (local rank {self.rank}, pid {self.pid})"


@contextmanager
def reporting_failure() -> Iterator[None]:
    """Leave word of an error where the elastic agent looks for it, if there is an agent."""
    try:
        yield
    except Exception as error:
        leave_word(error)
        raise


def leave_word(error: BaseException) -> None:
    """Write the reply file that the launcher reads, if there is a launcher."""
    path = environment.reply_file()
    if path is not None:
        with suppress(OSError):  # a full disk shall not hide the error
            write_failure(path, error)


def write_failure(path: Path, error: BaseException) -> None:
    """Write a reply file."""
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    reply = {
        "message": {
            "message": f"{type(error).__name__}: {error}{notes}",
            "extraInfo": {
                "py_callstack": "".join(traceback.format_exception(error)),
                "timestamp": str(int(time.time())),
            },
            # The agent's own time stamp counts whole seconds; failures follow each other faster.
            "time_ns": time.time_ns(),
            "shoal_error": _shoal_class(error),
            "text": str(error),
        }
    }
    path.write_text(json.dumps(reply), encoding="utf-8")


def read_reply(path: Path) -> Mapping[str, Any]:
    """Read what a rank left word of; nothing if it left none, or died while it wrote."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError):
        return {}


def as_error(
    ends: Sequence[RankEnd], folder: RunFolder, *, restart: int = 0, why: str = ""
) -> ShoalError:
    """Turn how the ranks ended into the one error to show; after so many restarts.

    `why` says before what their loss means.
    """
    stopped = why + "".join(
        f"{ended} was stopped by a signal (SIGSTOP or SIGTSTP), so the others waited in vain\n"
        for ended in ends
        if ended.was_stopped
    )
    lost = [ended for ended in ends if ended.is_lost]
    if not lost:  # the others did not watch it yet, or it is alone
        return RankError(f"{stopped}{resume_advice(folder)}")
    first = min(lost, key=_precedence)
    kind = getattr(errors, first.reply.get("shoal_error") or "", ShoalError)
    if issubclass(kind, SHARED_ERRORS):
        return kind(first.reply["text"])
    log = log_of(first.rank, folder.logs, restart=restart)
    return RankError(
        f"{stopped}{first} {_how_it_was_lost(first, ends, folder)}\n"
        f"What it last wrote is in {log}. {resume_advice(folder)}"
    )


def _how_it_was_lost(first: RankEnd, ends: Sequence[RankEnd], folder: RunFolder) -> str:
    """In which way a rank was lost."""
    if first.status < 0:
        what = f"{how_it_died(first)}. {_HINTS.get(-first.status, '')}".rstrip()
        if first.status == -signal.SIGABRT:  # which gloo does when sizes do not match
            what = f"{what}\n{post_mortem(folder.logs, [own.rank for own in ends])}".rstrip()
        return what
    if first.reply:
        return f"failed with {first.reply['message']}"
    return f"exited with status {first.status}"


def how_it_died(ended: RankEnd) -> str:
    """Name the signal that a rank died of."""
    return f"died with {_signal_name(-ended.status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def resume_advice(folder: RunFolder) -> str:
    """Tell how to go on with a run that ended early."""
    checkpoint = latest(folder.checkpoints)
    if checkpoint is None:
        return "There is no checkpoint yet."
    return f"Resume from step {step_of(checkpoint)} with: {folder.resume_command}"


def log_of(rank: int, logs: Path, *, restart: int = 0) -> Path:
    """Return the file that holds what a rank wrote to stderr, after so many restarts."""
    return logs / (f"rank-{rank}.restart-{restart}.err" if restart else f"rank-{rank}.err")


def _precedence(ended: RankEnd) -> tuple[int, int, int]:
    """Sort lost ranks by how likely they are the first one."""
    if ended.status == -signal.SIGABRT:
        return (2, 0, ended.rank)  # NCCL's watchdog aborts when another rank is gone
    if ended.status < 0:
        return (0, 0, ended.rank)  # no rank kills another
    return (1, ended.reply.get("time_ns", time.time_ns()), ended.rank)


def _shoal_class(error: BaseException) -> str | None:
    """Name the class of `shoal.errors` that an error is of."""
    for kind in type(error).__mro__:
        if kind.__module__ == errors.__name__:
            return kind.__name__
    return None

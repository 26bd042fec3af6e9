"""How a rank's failure travels: written by the rank, read by the launcher, told as one error.

A rank that raises writes a reply file in the form that torch's elastic agent reads, with two
fields of our own. A rank that is killed writes nothing; its exit status says it. When one rank
fails the others soon fail of its absence, so the launcher looks for the one that came first.
"""

from __future__ import annotations

import json
import signal
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shoal import errors
from shoal.checkpoint import latest
from shoal.errors import (
    EXIT_INTERRUPTED,
    CheckpointError,
    DivergedError,
    RankError,
    ShoalError,
    UsageError,
)
from shoal.train import environment
from shoal.train.checkpoints import step_of
from shoal.train.folder import RunFolder
from shoal.watch import post_mortem

SHARED = (UsageError, CheckpointError, DivergedError)
"""Errors that every rank meets alike, from what all share: one message says it for all."""

_HINTS: dict[int, str] = {
    signal.SIGKILL: "Someone killed it, or the system was out of memory.",
    signal.SIGSEGV: "A library crashed in native code.",
    signal.SIGBUS: "A library crashed in native code, or shared memory (/dev/shm) is full.",
}


@contextmanager
def reporting_failure() -> Iterator[None]:
    """Leave word of an error where the elastic agent looks for it, if there is an agent."""
    try:
        yield
    except Exception as error:
        path = environment.reply_file()
        if path is not None:
            with suppress(OSError):  # a full disk shall not hide the error
                write_failure(path, error)
        raise


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


def was_interrupted(failures: Mapping[int, ProcessFailure]) -> bool:
    """Tell whether the ranks only did as they were asked.

    The agent ends the others when the first rank exits; those did not fail either.
    """
    statuses = {failure.exitcode for failure in failures.values()}
    return EXIT_INTERRUPTED in statuses and statuses <= {EXIT_INTERRUPTED, -signal.SIGTERM}


def as_error(
    failures: Mapping[int, ProcessFailure], folder: RunFolder, *, restart: int = 0
) -> ShoalError:
    """Turn what the agent saw, by rank, into the one error to show; after so many restarts."""
    logs = {rank: log_of(rank, folder.logs, restart=restart) for rank in failures}
    rank, failure = min(failures.items(), key=lambda item: _precedence(*item, logs[item[0]]))
    reply = _reply(failure)
    kind = getattr(errors, reply.get("shoal_error") or "", ShoalError)
    if issubclass(kind, SHARED):
        return kind(reply["text"])
    who = f"rank {rank} (local rank {failure.local_rank}, pid {failure.pid})"
    if failure.exitcode < 0:
        hint = _HINTS.get(-failure.exitcode, "")
        what = f"died with {failure.signal_name()}. {hint}".rstrip()
        if failure.exitcode == -signal.SIGABRT:  # which gloo does when sizes do not match
            what = f"{what}\n{post_mortem(folder.logs, failures)}".rstrip()
    elif reply:
        what = f"failed with {reply['message']}"
    else:
        what = f"exited with status {failure.exitcode}"
    return RankError(f"{who} {what}\nWhat it last wrote is in {logs[rank]}. {last_words(folder)}")


def shared_error(replies: Path) -> ShoalError | None:
    """Find the error that all ranks met alike, if they left word of one in a folder."""
    for path in sorted(replies.glob("rank-*.json")):
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
        kind = getattr(errors, message.get("shoal_error") or "", None)
        if kind is not None and issubclass(kind, SHARED):
            return kind(message["text"])
    return None


def last_words(folder: RunFolder) -> str:
    """Tell how to go on with a run that ended early."""
    checkpoint = latest(folder.checkpoints)
    if checkpoint is None:
        return "There is no checkpoint yet."
    return f"Resume from step {step_of(checkpoint)} with: {folder.resume_command}"


def log_of(rank: int, logs: Path, *, restart: int = 0) -> Path:
    """Return the file that holds what a rank wrote to stderr, after so many restarts."""
    return logs / (f"rank-{rank}.restart-{restart}.err" if restart else f"rank-{rank}.err")


def _precedence(rank: int, failure: ProcessFailure, log: Path) -> tuple[int, int, int]:
    """Sort failures by how likely they are the first one."""
    number = -failure.exitcode
    if number == signal.SIGABRT:
        return (2, 0, rank)  # NCCL's watchdog aborts when another rank is gone
    if number == signal.SIGTERM:
        # From someone, or from the agent because another had failed: the time tells. A rank
        # dumps its stacks when it gets the signal.
        return (1, log.stat().st_mtime_ns if log.exists() else time.time_ns(), rank)
    if number > 0:
        return (0, 0, rank)  # no rank kills another
    return (1, _reply(failure).get("time_ns", time.time_ns()), rank)


def _reply(failure: ProcessFailure) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    return message if isinstance(message, dict) else {}


def _shoal_class(error: BaseException) -> str | None:
    """Name the class of `shoal.errors` that an error is of."""
    for kind in type(error).__mro__:
        if kind.__module__ == errors.__name__:
            return kind.__name__
    return None

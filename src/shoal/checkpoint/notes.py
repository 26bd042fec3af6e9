"""Notes that ranks leave in a save's hidden folder, to agree on it without a collective.

A save in the background cannot use the process group, which the training step is using. Every
rank must see the folder anyway: there it leaves a note that says what it wrote, or why it could
not, and the first rank collects them. Nobody leaves a note before its data is on the disk.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.checkpoint.disk import disk_errors
from shoal.checkpoint.manifest import (
    decoded_file,
    decoded_region,
    encoded_file,
    encoded_region,
)
from shoal.checkpoint.storage import WrittenFile
from shoal.errors import CheckpointError

_POLL_S = 0.01


def leave_note(staging: Path, rank: int, written: WrittenFile | None, failure: str | None) -> None:
    """Tell the first rank what this one wrote, or why it could not."""
    note: dict[str, object] = {"failure": failure}
    if written is not None:
        note["name"] = written.name
        note["file"] = encoded_file(written.file)
        note["regions"] = [[name, encoded_region(stored)] for name, stored in written.regions]
    path = _path(staging, rank)
    partial = path.with_suffix(".part")
    with disk_errors("write", path):
        partial.write_text(json.dumps(note))
        os.replace(partial, path)


def collect_notes(staging: Path, world_size: int, timeout_s: float) -> list[WrittenFile | None]:
    """Wait for the notes of all ranks, remove them, and say what is in the folder."""
    deadline = time.monotonic() + timeout_s
    found: list[WrittenFile | None] = []
    for rank in range(world_size):
        path = _path(staging, rank)
        _wait_until(
            path.exists,
            deadline,
            f"rank {rank} did not write its part of {staging} in {timeout_s:g} s: it died, is "
            "slow, or does not see this file system",
        )
        with disk_errors("read", path):
            note = json.loads(path.read_text())
            path.unlink()
        if note["failure"] is not None:
            raise CheckpointError(f"rank {rank}: {note['failure']}")
        found.append(_written(note))
    return found


def await_outcome(staging: Path, folder: Path, timeout_s: float) -> None:
    """Wait until the first rank has published the folder, or given it up, which raises."""
    _wait_until(
        lambda: not staging.exists(),
        time.monotonic() + timeout_s,
        f"rank 0 did not publish {folder} in {timeout_s:g} s: it died, is slow, or waits",
    )
    if not folder.exists():
        raise CheckpointError(f"{folder} was not saved; rank 0 knows why")


def _written(note: dict[str, Any]) -> WrittenFile | None:
    if "file" not in note:
        return None
    regions = tuple((name, decoded_region(fields)) for name, fields in note["regions"])
    return WrittenFile(name=note["name"], file=decoded_file(note["file"]), regions=regions)


def _wait_until(ready: Callable[[], bool], deadline: float, message: str) -> None:
    while not ready():
        if time.monotonic() > deadline:
            raise CheckpointError(message)
        time.sleep(_POLL_S)


def _path(staging: Path, rank: int) -> Path:
    return staging / f"rank-{rank:05d}.note"

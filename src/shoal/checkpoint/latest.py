"""Where a run's checkpoints are: one folder per step, the newest with the highest number."""

from __future__ import annotations

import re
from pathlib import Path

from shoal.checkpoint.disk import Folder, disk_errors
from shoal.checkpoint.manifest import NAME
from shoal.errors import UsageError

_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def step_folder(checkpoints: Folder, step: int) -> Path:
    """Name the checkpoint of a step."""
    return Path(checkpoints) / f"step-{step:08d}"


def existing(folder: Folder | None) -> Path:
    """The folder to load; raises UsageError for what `latest` gives where there is none."""
    if folder is None:
        raise UsageError(
            "there is no checkpoint to load: `latest` gives None before the first one is saved. "
            "Load only if it gives a folder"
        )
    return Path(folder)


def latest(checkpoints: Folder) -> Path | None:
    """Find the complete checkpoint of the highest step, or None; unfinished ones do not count."""
    found = complete_steps(Path(checkpoints))
    return found[max(found)] if found else None


def complete_steps(checkpoints: Path) -> dict[int, Path]:
    """List the complete checkpoints of a folder by their steps."""
    if not checkpoints.is_dir():
        return {}
    with disk_errors("list", checkpoints):
        return {
            int(match[1]): path
            for path in checkpoints.iterdir()
            if (match := _STEP_FOLDER.fullmatch(path.name)) and (path / NAME).is_file()
        }

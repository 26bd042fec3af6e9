"""Which of a run's checkpoints stay: the last few, and one of every so many steps."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.disk import Folder, disk_errors, sync_folder
from shoal.checkpoint.latest import complete_steps
from shoal.errors import UsageError
from shoal.files import remove_folder

LINK = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Keep the `last` newest checkpoints, and those whose step is a multiple of `every`.

    Zero for `last` keeps all; zero for `every` keeps none beyond the last ones.
    """

    last: int = 0
    every: int = 0

    def __post_init__(self) -> None:
        if self.last < 0 or self.every < 0:
            raise UsageError(
                f"expected numbers of checkpoints of 0 or more, got last={self.last}, "
                f"every={self.every}"
            )

    def expired(self, steps: list[int]) -> list[int]:
        """The steps whose checkpoints may go; never the newest."""
        if not self.last:
            return []
        old = sorted(steps)[: -self.last]
        return [step for step in old if not self.every or step % self.every]

    def apply(self, checkpoints: Folder) -> list[Path]:
        """Remove the complete checkpoints that may go, and say which; one rank calls this.

        A folder is renamed first, so that a crash leaves no half of a checkpoint under its name.
        """
        folders = complete_steps(Path(checkpoints))
        removed = [folders[step] for step in self.expired(list(folders))]
        for folder in removed:
            aside = folder.with_name(f".{folder.name}.saving-{secrets.token_hex(6)}")
            with disk_errors("remove", folder):
                folder.rename(aside)
                remove_folder(aside)
        return removed


def point_latest(checkpoints: Folder) -> Path | None:
    """Let the link `latest` name the newest checkpoint, at once for all readers; one rank calls.

    A convenience for people: `shoal.checkpoint.latest` looks at the folders themselves.
    """
    checkpoints = Path(checkpoints)
    folders = complete_steps(checkpoints)
    if not folders:
        return None
    newest = folders[max(folders)]
    link = checkpoints / LINK
    partial = checkpoints / f".{LINK}-{secrets.token_hex(6)}"
    with disk_errors("write", link):
        partial.symlink_to(newest.name)
        os.replace(partial, link)
    sync_folder(checkpoints)
    return newest

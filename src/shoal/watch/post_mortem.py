"""What the logs of ranks tell when none of them is left to ask."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shoal.watch.diagnosis import differences
from shoal.watch.log import log_path, logged_ranks, read_log


def post_mortem(folder: Path | str, ranks: Iterable[int] | None = None) -> str:
    """Say which rank launched another collective than the others; nothing if none did.

    `folder` is the one that the ranks' `Watchdog` was given; all ranks that left a log there are
    compared unless `ranks` names some.
    """
    folder = Path(folder)
    compared = logged_ranks(folder) if ranks is None else ranks
    return differences({rank: read_log(log_path(folder, rank)) for rank in compared})

"""What the logs of ranks tell when none of them is left to ask."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shoal.watch.diagnosis import differences
from shoal.watch.log import log_path, read_log


def post_mortem(folder: Path, ranks: Iterable[int]) -> str:
    """Say which rank launched another collective than the others; nothing if none did."""
    return differences({rank: read_log(log_path(folder, rank)) for rank in ranks})

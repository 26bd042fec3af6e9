"""How a test on ranks fails.

RankFailed      a rank raised
├── RankDied    a rank's process ended: killed, crashed, or exited
└── RankHung    ranks did not finish in time
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest


class RankFailed(pytest.fail.Exception):
    """A rank raised; the message holds its traceback, and where every other rank was.

    It is pytest's own kind of failure, so that pytest shows this message and not the harness.
    """

    def __init__(
        self,
        headline: str,
        *,
        rank: int,
        traceback: str,
        others: Mapping[int, str],
    ) -> None:
        super().__init__(headline, pytrace=False)
        self.headline = headline
        self.rank = rank
        """The rank that failed first; of those that hung, the lowest."""
        self.traceback = traceback
        """That rank's own traceback; its last output if it died, its stacks if it hung."""
        self.others = dict(others)
        """For each other rank: its stacks, its own traceback, or how it ended."""

    def __str__(self) -> str:
        places = {self.rank: self.traceback, **self.others}
        sections = [f"---- rank {rank} ----\n{text.rstrip()}" for rank, text in places.items()]
        return "\n\n".join([self.headline, *sections])


class RankDied(RankFailed):
    """A rank's process ended under the test."""


class RankHung(RankFailed):
    """Ranks did not finish in time."""

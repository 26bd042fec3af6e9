"""The topics that can be logged, and how they are chosen."""

from __future__ import annotations

from enum import StrEnum

from shoal.errors import UsageError


class Topic(StrEnum):
    """Something that the compiler can tell about."""

    SIGNATURE = "signature"
    """What each input and output of a function is."""
    GRAPHS = "graphs"
    """The graphs before and after each stage."""
    CODE = "code"
    """The generated functions."""
    PARTITION = "partition"
    """What forward saves for backward."""
    COLLECTIVES = "collectives"
    """What became of communication, pass by pass."""
    CACHE = "cache"
    """What was found, stored, or cannot be stored, and why."""
    BREAKS = "breaks"
    """Why a graph broke, or was compiled again."""


ALL = "all"


def topics_of(text: str) -> frozenset[Topic]:
    """The topics in a list that is separated by commas; `all` stands for every one."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in words if word != ALL and word not in list(Topic)]
    if unknown:
        raise UsageError(
            f"expected topics of the compiler's log (SHOAL_LOGS, option 'logs') out of "
            f"{', '.join([*Topic, ALL])}, separated by commas; got {', '.join(map(repr, unknown))}"
        )
    return frozenset(Topic) if ALL in words else frozenset(map(Topic, words))

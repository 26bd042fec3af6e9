"""Log lines of the compiler: the topics, and where their lines go."""

from __future__ import annotations

import functools
import logging
import sys
from enum import StrEnum

from shoal.errors import UsageError

LOGGER = "shoal.compile"
"""The parent of one logger for each topic."""


class _ToStderr(logging.Handler):
    """Writes to what stderr is now; with colours where that is a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message: its first line is a title, the rest what it is about."""
        title, _, body = self.format(record).partition("\n")
        if sys.stderr.isatty():
            _print_in_colours(title, body)
        else:
            print("\n".join(part for part in (title, body) if part), file=sys.stderr, flush=True)


def _print_in_colours(title: str, body: str) -> None:
    # Imported here, so that the compiler runs without it where nobody looks.
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.text import Text

    console = Console(stderr=True)
    console.print(Text(title, style="bold cyan"))
    if body:
        console.print(Syntax(body, "python", background_color="default", word_wrap=True))


@functools.cache
def _ready() -> None:
    """Give the compiler's logger a place to write to, unless the program has one."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = _ToStderr()
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        logger.addHandler(handler)


def write(topic: Topic, text: str) -> None:
    """Log a text about a topic that somebody has asked for."""
    _ready()
    logging.getLogger(f"{LOGGER}.{topic}").info("%s", text)


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

"""Libraries that only some runs need: imported when they are used, refused in clear words."""

from __future__ import annotations

import importlib
import re
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from shoal.errors import UsageError

_OLDEST = {"transformers": (5, 23), "tokenizers": (0, 20), "datasets": (3, 0), "pyarrow": (15, 0)}
"""The release from which each can be used; of others any will do."""


def check_framework(name: str, *, what: str) -> None:
    """Raise a `UsageError` unless `name` is installed in a usable version, without importing it.

    `what` needs it: a flag, or a kind of file.
    """
    oldest = _OLDEST.get(name, (0,))
    wanted = f"{name}>={'.'.join(map(str, oldest))}" if any(oldest) else name
    try:
        found = version(name)
    except PackageNotFoundError:
        raise UsageError(
            f"{what} needs {name}, which is not installed; try: pip install '{wanted}'"
        ) from None
    release = tuple(int(number) for number in re.findall(r"\d+", found)[:2])
    if release < oldest:
        raise UsageError(
            f"{what} needs {wanted}, found {found}; try: pip install --upgrade '{wanted}'"
        )


def import_framework(name: str, *, what: str) -> ModuleType:
    """Import `name`, or raise a `UsageError` that says why it cannot be and what to do."""
    check_framework(name.partition(".")[0], what=what)
    try:
        return importlib.import_module(name)
    except Exception as error:  # a half-installed one may raise anything
        raise UsageError(
            f"{what} needs {name}, which is installed but cannot be imported: {in_one_line(error)}"
        ) from error


def in_one_line(error: Exception) -> str:
    """What a library says, with its type: messages of ours are one line, some of theirs are not."""
    return " ".join(f"{type(error).__name__}: {error}".split())

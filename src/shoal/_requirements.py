"""Whether the installed torch is one that shoal works with, without importing it."""

from __future__ import annotations

import re
import warnings
from importlib.metadata import PackageNotFoundError, version

OLDEST, NEWEST = (2, 11), (2, 13)
"""Releases of torch, from and to, that tests run on."""


def check_torch() -> None:
    """Raise for a torch that is too old; warn of one that is newer than shoal."""
    try:
        found = version("torch")
    except PackageNotFoundError:
        return  # built from source, or not there: importing it says which
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None:
        return
    release = int(numbers[1]), int(numbers[2])
    wanted = f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, found {found}"
    if release < OLDEST:
        raise ImportError(
            f"shoal needs {wanted}: pip install "
            f"'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )
    if release > NEWEST:
        warnings.warn(
            f"shoal is tested on {wanted}: if something breaks inside of torch, install one of "
            "those",
            RuntimeWarning,
            stacklevel=3,
        )

"""Which frameworks are installed, and which releases the integrations work with."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version


class FrameworkError(ImportError):
    """A framework that an integration needs is not installed, or too old."""


def require(package: str, oldest: tuple[int, int], extra: str) -> None:
    """Raise `FrameworkError` unless a package is installed in this release or a newer one."""
    wanted = f"{package} {oldest[0]}.{oldest[1]} or newer"
    remedy = f"pip install 'shoal[{extra}]'"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise FrameworkError(f"expected {wanted}, found none: {remedy}") from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < oldest:
        raise FrameworkError(f"expected {wanted}, found {found}: {remedy} --upgrade")

"""Which tensors a load takes, and whether they fit what they are loaded into."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from shoal.checkpoint.metadata import Manifest
from shoal.checkpoint.placement import Share
from shoal.errors import CheckpointError, UsageError

MOST_NAMES = 3
"""Tensors named in an error for each thing that is wrong with them; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The names to load, by patterns such as `model/layers.0.*`; all of them by default."""

    include: Sequence[str] = ("*",)
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        for field in (self.include, self.exclude):
            if isinstance(field, str):
                raise UsageError(
                    f"expected a list of patterns to include or exclude, got {field!r}"
                )

    def of(self, names: Iterable[str]) -> list[str]:
        """The selected ones, in order of the alphabet."""
        return sorted(name for name in names if self._has(name))

    def check_used(self, names: Iterable[str]) -> None:
        """Raise if a pattern matches no name at all: it is a typing error."""
        names = list(names)
        for pattern in (*self.include, *self.exclude):
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                near = ", ".join(repr(name) for name in sorted(names)[:MOST_NAMES])
                raise UsageError(
                    f"the pattern {pattern!r} matches no tensor; the names begin with {near}"
                )

    def _has(self, name: str) -> bool:
        return any(fnmatchcase(name, p) for p in self.include) and not any(
            fnmatchcase(name, p) for p in self.exclude
        )


def check_match(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str],
    shares: Mapping[str, Share],
    *,
    cast: bool,
    is_partial: bool,
) -> None:
    """Raise one error that names what does not fit, and what to do about it.

    `is_partial` says that the caller can choose what to load.
    """
    stored = {name: manifest.tensors[name] for name in names}
    both = [name for name in shares if name in stored]
    shapes = [
        f"{name!r} is {stored[name].shape} there, {shares[name].shape} here"
        for name in both
        if stored[name].shape != shares[name].shape
    ]
    dtypes = [
        f"{name!r} is {stored[name].dtype} there, {shares[name].dtype} here"
        for name in both
        if not _dtype_fits(stored[name].dtype, shares[name].dtype, cast)
    ]
    problems = [
        *_listed("not in the checkpoint", [repr(name) for name in shares if name not in stored]),
        *_listed("only in the checkpoint", [repr(name) for name in stored if name not in shares]),
        *_listed("of another shape", shapes),
        *_listed("of another dtype", dtypes),
    ]
    if problems:
        hint = "Build the model and optimizer as they were when it was saved, or load another one"
        partly = ", or say what to load with include= and exclude=" if is_partial else ""
        castable = ", or let floating-point numbers change with cast=True" if dtypes else ""
        raise CheckpointError(
            f"{folder} does not fit what it should be loaded into:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + f"\n{hint}{partly}{castable if is_partial else ''}"
        )


def _dtype_fits(there: torch.dtype, here: torch.dtype, cast: bool) -> bool:
    floating = there.is_floating_point and here.is_floating_point
    return there == here or (cast and floating)


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = f"; and {len(items) - MOST_NAMES} more" if len(items) > MOST_NAMES else ""
    return [f"{len(items)} {what}: {'; '.join(items[:MOST_NAMES])}{more}"]

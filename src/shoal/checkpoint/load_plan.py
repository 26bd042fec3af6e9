"""The plan of a load, before any data is touched: which tensors fit, and which bytes go where.

In: a manifest, the tensors to fill, and patterns that choose among them. Out: for each tensor the
stored regions that overlap this rank's parts of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from shoal.checkpoint.data_files import RegionReader, Take, aligned, fresh
from shoal.checkpoint.manifest import Manifest, StoredRegion, TensorEntry
from shoal.checkpoint.shares import Part, Share, share_of
from shoal.checkpoint.storage import Checkpoint
from shoal.errors import CheckpointError, UsageError
from shoal.layout.region import Region

MOST_NAMES = 3
"""Tensors named in an error for each thing that is wrong with them; the rest is counted."""

Copy = Callable[[], object]
"""Writes values that were read and verified into their place."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A stored region, the parts of it that this rank needs, and where each goes."""

    stored: StoredRegion
    pieces: tuple[tuple[Region, torch.Tensor], ...]

    @property
    def num_bytes(self) -> int:
        """How much of a `Staging` its values take."""
        return sum(aligned(part.numel * self.stored.dtype.itemsize) for part, _ in self.pieces)

    def read(self, reader: RegionReader, take: Take = fresh) -> Copy:
        """Fetch the checked values now, and return what writes them."""
        parts = [part for part, _ in self.pieces]
        values = reader.read(self.stored, parts, take)

        def write() -> None:
            for (_, target), value in zip(self.pieces, values, strict=True):
                target.copy_(value)

        return write


def plan_load(
    checkpoint: Checkpoint,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor | Share],
    choice: Selection,
    cast: bool,
) -> dict[str, list[Move]]:
    """Find out what goes where, before any data is touched; in the same order on all ranks."""
    choice.check_used({*manifest.tensors, *tensors})
    shares = {name: share_of(name, tensors[name], is_first=True) for name in choice.of(tensors)}
    names = choice.of(manifest.tensors)
    check_match(checkpoint, manifest, names, shares, cast=cast, is_partial=True)
    return {
        name: moves_into(name, manifest.tensors[name], share.parts)
        for name, share in shares.items()
    }


def check_match(
    checkpoint: Checkpoint,
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
            f"{checkpoint} does not fit what it should be loaded into:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + f"\n{hint}{partly}{castable if is_partial else ''}"
        )


def moves_into(name: str, entry: TensorEntry, held: Sequence[Part]) -> list[Move]:
    """Find the stored regions that hold what this rank needs; together they hold all of it."""
    found: dict[StoredRegion, list[tuple[Region, torch.Tensor]]] = defaultdict(list)
    for part in held:
        overlaps: list[Region] = []
        for stored in entry.regions:
            overlap = stored.region.overlap(part.region)
            if overlap is not None:
                found[stored].append((overlap.relative_to(stored.region), part.view(overlap)))
                overlaps.append(overlap)
        _check_filled(name, part.region, overlaps)
    return [Move(stored=stored, pieces=tuple(pieces)) for stored, pieces in found.items()]


def _check_filled(name: str, region: Region, overlaps: list[Region]) -> None:
    found = sum(overlap.numel for overlap in overlaps)
    if found != region.numel or not _disjoint(overlaps):
        raise CheckpointError(
            f"tensor {name!r}: the checkpoint's regions hold {found:,} elements for "
            f"{region}, which has {region.numel:,}, or hold some twice; "
            "the manifest is inconsistent"
        )


def _disjoint(regions: list[Region]) -> bool:
    """Whether no element is in two regions: compares each with those that begin before it ends."""
    alive: list[Region] = []
    for region in sorted(regions, key=lambda region: region.offsets):
        if not region.sizes:
            return len(regions) == 1
        alive = [other for other in alive if other.stops[0] > region.offsets[0]]
        if any(region.overlap(other) is not None for other in alive):
            return False
        alive.append(region)
    return True


def _dtype_fits(there: torch.dtype, here: torch.dtype, cast: bool) -> bool:
    floating = there.is_floating_point and here.is_floating_point
    return there == here or (cast and floating)


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = f"; and {len(items) - MOST_NAMES} more" if len(items) > MOST_NAMES else ""
    return [f"{len(items)} {what}: {'; '.join(items[:MOST_NAMES])}{more}"]

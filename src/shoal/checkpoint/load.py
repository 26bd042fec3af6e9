"""Loading: compare, then read, verify and copy, a few tensors at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.checkpoint.agreement import Ranks
from shoal.checkpoint.manifest import fingerprint, read_manifest
from shoal.checkpoint.metadata import JSON, Manifest, StoredRegion, TensorEntry
from shoal.checkpoint.placement import Part, Share, share_of
from shoal.checkpoint.reader import RegionReader
from shoal.checkpoint.selection import Selection, check_match
from shoal.errors import CheckpointError
from shoal.layout.region import Region

BATCH_BYTES = 64 << 20
"""Tensors are read, agreed on and written together until they have this many bytes as wholes.

The limit is the largest tensor where that is larger. A rank holds its shards of one batch, and one
block besides, in host memory: about the shard of the largest tensor.
"""

Copy = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A stored region, the part of it that this rank needs, and where that goes."""

    name: str
    entry: TensorEntry
    stored: StoredRegion
    part: Region
    target: torch.Tensor

    def read(self, reader: RegionReader) -> Copy:
        """Fetch the checked values now, and return what writes them."""
        values = reader.read(self.name, self.entry, self.stored)
        if self.part.numel < self.stored.region.numel:
            # A copy of the part, so that the rest of the block does not stay in memory.
            values = values[self.part.slices].clone()
        return lambda: self.target.copy_(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a load will do on this rank; batches have the same tensors on all ranks."""

    manifest: Manifest
    batches: Sequence[Sequence[Move]]

    def verify(self, reader: RegionReader) -> None:
        """Check everything that this rank will read, and write nothing."""
        for batch in self.batches:
            for move in batch:
                reader.verify(move.name, move.entry, move.stored)


def load(
    folder: Path,
    tensors: Mapping[str, torch.Tensor | Share],
    *,
    group: dist.ProcessGroup | None = None,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    cast: bool = False,
    verify_first: bool = False,
    before_write: Callable[[], object] | None = None,
) -> dict[str, JSON]:
    """Fill tensors in place from a checkpoint of any number of ranks; return its `extra`.

    Every rank of the group calls this with the same names. A rank reads the regions that overlap
    its own. Names, shapes and dtypes are compared before anything else; `include` and `exclude`
    are patterns that choose among the names on both sides, and `cast` lets floating-point dtypes
    differ. No tensor is written on any rank before all ranks have compared the checksums of all
    of it; with `verify_first`, those of all tensors, for which everything is read twice.

    Whatever is wrong on any rank, every rank raises `CheckpointError`. `before_write` is called
    when the first tensor is about to be written: from there on an error leaves a mixture.
    """
    folder = Path(folder)
    ranks = Ranks(group)
    choice = Selection(include=include, exclude=exclude)
    plan = ranks.together(lambda: _plan(folder, tensors, choice, cast))
    if len(set(ranks.exchange(fingerprint(plan.manifest)))) > 1:
        raise CheckpointError(
            f"the ranks read different checkpoints at {folder}: every rank must see the same "
            "folder, on a shared file system or as the same copy on each host"
        )
    with RegionReader(folder, plan.manifest) as reader, torch.no_grad():
        if verify_first:
            ranks.together(lambda: plan.verify(reader))
        _stream(ranks, reader, plan, before_write)
    return dict(plan.manifest.extra)


def _stream(
    ranks: Ranks,
    reader: RegionReader,
    plan: LoadPlan,
    before_write: Callable[[], object] | None,
) -> None:
    """Write each batch when all ranks have verified it; one agreement for each."""
    pending: list[Copy] = []
    for index, batch in enumerate((*plan.batches, ())):
        # Called on every rank before the first write on any: a mixture is everybody's.
        first = before_write if index == 1 else None
        pending = ranks.together(
            lambda first=first, copies=pending, batch=batch: _turn(reader, first, copies, batch)
        )


def _turn(
    reader: RegionReader,
    before_write: Callable[[], object] | None,
    copies: Sequence[Copy],
    batch: Sequence[Move],
) -> list[Copy]:
    """Write what all ranks have agreed on, and read what comes next."""
    if before_write is not None:
        before_write()
    for copy in copies:
        copy()
    reader.recycle()
    return [move.read(reader) for move in batch]


def _plan(
    folder: Path, tensors: Mapping[str, torch.Tensor | Share], choice: Selection, cast: bool
) -> LoadPlan:
    """Read the manifest, and find out what goes where, before any data is touched."""
    manifest = read_manifest(folder)
    choice.check_used({*manifest.tensors, *tensors})
    shares = {name: share_of(name, tensors[name], is_first=True) for name in choice.of(tensors)}
    check_match(folder, manifest, choice.of(manifest.tensors), shares, cast)
    batches = [
        [
            move
            for name in names
            for part in shares[name].parts
            for move in moves_into(name, manifest.tensors[name], part)
        ]
        for names in _batched(manifest, list(shares))
    ]
    return LoadPlan(manifest=manifest, batches=batches)


def _batched(manifest: Manifest, names: Sequence[str]) -> Iterator[list[str]]:
    """Group tensors by their size as wholes, which all ranks know."""
    sizes = {name: manifest.tensors[name].num_bytes for name in names}
    limit = max([BATCH_BYTES, *sizes.values()])
    batch: list[str] = []
    num_bytes = 0
    for name, added in sizes.items():
        if batch and num_bytes + added > limit:
            yield batch
            batch, num_bytes = [], 0
        batch.append(name)
        num_bytes += added
    if batch:
        yield batch


def moves_into(name: str, entry: TensorEntry, held: Part) -> list[Move]:
    """Find the stored regions that hold what this rank needs; together they hold all of it."""
    moves: list[Move] = []
    overlaps: list[Region] = []
    for stored in entry.regions:
        overlap = stored.region.overlap(held.region)
        if overlap is not None:
            target = held.local[overlap.relative_to(held.region).slices]
            part = overlap.relative_to(stored.region)
            moves.append(Move(name=name, entry=entry, stored=stored, part=part, target=target))
            overlaps.append(overlap)
    found = sum(overlap.numel for overlap in overlaps)
    if found != held.region.numel or not _disjoint(overlaps):
        raise CheckpointError(
            f"tensor {name!r}: the checkpoint's regions hold {found:,} elements for "
            f"{held.region}, which has {held.region.numel:,}, or hold some twice; "
            "the manifest is inconsistent"
        )
    return moves


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

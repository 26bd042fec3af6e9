"""Loading: compare, then read, verify and copy, a few tensors at a time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.checkpoint.agreement import Agreement, Ranks
from shoal.checkpoint.batches import Batch, agreed_batches
from shoal.checkpoint.disk import Folder
from shoal.checkpoint.latest import existing
from shoal.checkpoint.manifest import fingerprint, read_manifest
from shoal.checkpoint.metadata import JSON, Manifest, StoredRegion, TensorEntry
from shoal.checkpoint.placement import Part, Share, share_of
from shoal.checkpoint.reader import RegionReader, Take, fresh
from shoal.checkpoint.selection import Selection, check_match
from shoal.checkpoint.staging import Staging, aligned
from shoal.errors import CheckpointError
from shoal.layout.region import Region

Copy = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A stored region, the parts of it that this rank needs, and where each goes."""

    name: str
    entry: TensorEntry
    stored: StoredRegion
    parts: tuple[Region, ...]
    targets: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        """How much of a `Staging` its values take."""
        return sum(aligned(part.numel * self.entry.dtype.itemsize) for part in self.parts)

    def read(self, reader: RegionReader, take: Take = fresh) -> Copy:
        """Fetch the checked values now, and return what writes them."""
        values = reader.read(self.name, self.entry, self.stored, self.parts, take)

        def write() -> None:
            for target, value in zip(self.targets, values, strict=True):
                target.copy_(value)

        return write


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a load will do on this rank, tensor by tensor, in the same order on all ranks."""

    manifest: Manifest
    moves: Mapping[str, Sequence[Move]]

    @property
    def sizes(self) -> list[int]:
        """How much of a `Staging` each tensor takes."""
        return [sum(move.num_bytes for move in moves) for moves in self.moves.values()]

    def check(self, reader: RegionReader, verify: bool) -> None:
        """Open every file that this rank will read; with `verify`, compare all checksums, too."""
        for moves in self.moves.values():
            for move in moves:
                if verify:
                    reader.verify(move.name, move.entry, move.stored)
                else:
                    reader.check_file(move.stored.file, move.name)

    def batched(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, list[Move]]]:
        """What is to be moved in each batch."""
        each = iter(self.moves.values())
        for batch in batches:
            yield batch, [move for moves in islice(each, batch.num_tensors) for move in moves]


def load(
    folder: Folder | None,
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
    folder = existing(folder)
    ranks = Ranks(group)
    manifest = ranks.together(lambda: read_manifest(folder))
    choice = Selection(include=include, exclude=exclude)
    fill(ranks, folder, manifest, tensors, choice, cast, verify_first, before_write)
    return dict(manifest.extra)


def fill(
    ranks: Ranks,
    folder: Path,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor | Share],
    choice: Selection,
    cast: bool,
    verify_first: bool,
    before_write: Callable[[], object] | None,
) -> None:
    """Fill tensors from a checkpoint whose manifest this rank has read. Collective; see `load`."""
    plan = ranks.together(lambda: _plan(folder, manifest, tensors, choice, cast))
    if len(set(ranks.exchange(fingerprint(plan.manifest)))) > 1:
        raise CheckpointError(
            f"the ranks read different checkpoints at {folder}: every rank must see the same "
            "folder, on a shared file system or as the same copy on each host"
        )
    batches = [*plan.batched(agreed_batches(ranks, plan.sizes))]
    with RegionReader(folder, plan.manifest) as reader, torch.no_grad():
        ranks.together(lambda: plan.check(reader, verify_first))
        _stream(ranks, reader, batches, before_write)


def _stream(
    ranks: Ranks,
    reader: RegionReader,
    batches: Sequence[tuple[Batch, Sequence[Move]]],
    before_write: Callable[[], object] | None,
) -> None:
    """Write each batch when all ranks have verified it; read the next while they agree."""
    staging = Staging(_staged_bytes(batches))
    reading: deque[Agreement[list[Copy]]] = deque()
    for index, (batch, moves) in enumerate(batches):
        before: Callable[[], object] | None = None
        agreed: list[Copy] = []
        while len(reading) > (1 if batch.overlaps else 0):
            agreed += reading.popleft().result()
            # On every rank, also one that has nothing to write yet: a mixture is everybody's.
            before, before_write = before or before_write, None
        take = staging.end(index)
        reading.append(ranks.begin(partial(_turn, before, agreed, moves, reader, take)))
    rest = [copy for agreement in reading for copy in agreement.result()]
    ranks.together(lambda: _turn(before_write, rest, (), reader, fresh))


def _turn(
    before_write: Callable[[], object] | None,
    copies: Sequence[Copy],
    moves: Sequence[Move],
    reader: RegionReader,
    take: Take,
) -> list[Copy]:
    """Write what all ranks have agreed on, and read what comes next."""
    if before_write is not None:
        before_write()
    for copy in copies:
        copy()
    return [move.read(reader, take) for move in moves]


def _staged_bytes(batches: Sequence[tuple[Batch, Sequence[Move]]]) -> int:
    """What this rank needs for a batch, or for two where they overlap."""
    most = before = 0
    for batch, moves in batches:
        own = sum(move.num_bytes for move in moves)
        most = max(most, own + before if batch.overlaps else own)
        before = own
    return most


def _plan(
    folder: Path,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor | Share],
    choice: Selection,
    cast: bool,
) -> LoadPlan:
    """Find out what goes where, before any data is touched."""
    choice.check_used({*manifest.tensors, *tensors})
    shares = {name: share_of(name, tensors[name], is_first=True) for name in choice.of(tensors)}
    names = choice.of(manifest.tensors)
    check_match(folder, manifest, names, shares, cast=cast, is_partial=True)
    moves = {
        name: moves_into(name, manifest.tensors[name], share.parts)
        for name, share in shares.items()
    }
    return LoadPlan(manifest=manifest, moves=moves)


def moves_into(name: str, entry: TensorEntry, held: Sequence[Part]) -> list[Move]:
    """Find the stored regions that hold what this rank needs; together they hold all of it."""
    found: dict[StoredRegion, list[tuple[Region, torch.Tensor]]] = defaultdict(list)
    for part in held:
        overlaps: list[Region] = []
        for stored in entry.regions:
            overlap = stored.region.overlap(part.region)
            if overlap is not None:
                target = part.local[overlap.relative_to(part.region).slices]
                found[stored].append((overlap.relative_to(stored.region), target))
                overlaps.append(overlap)
        _check_filled(name, part.region, overlaps)
    return [
        Move(
            name=name,
            entry=entry,
            stored=stored,
            parts=tuple(part for part, _ in pieces),
            targets=tuple(target for _, target in pieces),
        )
        for stored, pieces in found.items()
    ]


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

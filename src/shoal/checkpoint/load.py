"""Loading: compare, then read, verify and copy, a few tensors at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice

import torch
import torch.distributed as dist

from shoal.checkpoint.data_files import RegionReader, Take, aligned, fresh
from shoal.checkpoint.disk import Folder, checkpoint_at
from shoal.checkpoint.load_plan import Copy, Move, Selection, plan_load
from shoal.checkpoint.manifest import JSON, Manifest, fingerprint, read_manifest
from shoal.checkpoint.ranks import Agreement, Ranks
from shoal.checkpoint.shares import Share
from shoal.checkpoint.storage import Checkpoint
from shoal.errors import CheckpointError

STAGED_BYTES = 32 << 20
"""As much as this waits in host memory on a rank until all ranks have verified theirs.

The limit is the largest part that any rank has of any tensor, where that is larger: a tensor is
written when all of it is verified. So a load holds that much, and the region that is being read.
"""


def load(
    folder: Folder | Checkpoint | None,
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
    checkpoint = checkpoint_at(folder)
    ranks = Ranks(group)
    manifest = ranks.together(lambda: read_manifest(checkpoint))
    choice = Selection(include=include, exclude=exclude)
    fill(ranks, checkpoint, manifest, tensors, choice, cast, verify_first, before_write)
    return dict(manifest.extra)


def fill(
    ranks: Ranks,
    checkpoint: Checkpoint,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor | Share],
    choice: Selection,
    cast: bool,
    verify_first: bool,
    before_write: Callable[[], object] | None,
) -> None:
    """Fill tensors from a checkpoint whose manifest this rank has read. Collective; see `load`."""
    plan = ranks.together(lambda: plan_load(checkpoint, manifest, tensors, choice, cast))
    if len(set(ranks.exchange(fingerprint(manifest)))) > 1:
        raise CheckpointError(
            f"the ranks read different checkpoints at {checkpoint}: every rank must see the same "
            "folder, on a shared file system or as the same copy on each host"
        )
    sizes = ranks.gather([sum(move.num_bytes for move in moves) for moves in plan.values()])
    batches = ranks.first(lambda: batches_of(sizes))
    each = iter(plan.values())
    batched = [(batch, [*chain(*islice(each, batch.num_tensors))]) for batch in batches]
    with RegionReader(checkpoint, manifest) as reader, torch.no_grad():
        ranks.together(lambda: _check(reader, chain(*plan.values()), verify_first))
        _stream(ranks, reader, batched, before_write)


def _check(reader: RegionReader, moves: Iterable[Move], verify: bool) -> None:
    """Open every file that this rank will read; with `verify`, compare all checksums, too."""
    for move in moves:
        if verify:
            reader.verify(move.stored)
        else:
            reader.open_file(move.stored.file, move.stored.name)


def _stream(
    ranks: Ranks,
    reader: RegionReader,
    batches: Sequence[tuple[LoadBatch, Sequence[Move]]],
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


def _staged_bytes(batches: Sequence[tuple[LoadBatch, Sequence[Move]]]) -> int:
    """The bytes that this rank needs for a batch, or for two where they overlap."""
    most = before = 0
    for batch, moves in batches:
        own = sum(move.num_bytes for move in moves)
        most = max(most, own + before if batch.overlaps else own)
        before = own
    return most


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBatch:
    """Tensors that are read and agreed on together, the next ones in order.

    `overlaps` says that no rank lacks the memory to read them while the ranks still agree on the
    batch before.
    """

    num_tensors: int
    overlaps: bool


def batches_of(everywhere: Sequence[Sequence[int]]) -> list[LoadBatch]:
    """Fill batches in order to half of the limit, so that two of them fit.

    `everywhere` says for each rank how many bytes of a `Staging` each tensor takes there.
    """
    if len({len(sizes) for sizes in everywhere}) > 1:
        numbers = ", ".join(str(len(sizes)) for sizes in everywhere)
        raise CheckpointError(
            f"the ranks load different tensors: {numbers} of them. Give every rank the same names, "
            "include= and exclude="
        )
    limit = max([STAGED_BYTES, *(size for sizes in everywhere for size in sizes)])
    batches: list[LoadBatch] = []
    before = used = [0] * len(everywhere)
    count = 0

    def close() -> None:
        fits = all(a + b <= limit for a, b in zip(before, used, strict=True))
        batches.append(LoadBatch(num_tensors=count, overlaps=fits))

    for added in zip(*everywhere, strict=True):
        together = [a + b for a, b in zip(used, added, strict=True)]
        if count and max(together) > limit // 2:
            close()
            before, used, count = used, list(added), 1
        else:
            used, count = together, count + 1
    if count:
        close()
    return batches


class Staging:
    """One piece of memory with two ends, where two batches meet: each grows from its own.

    Memory that is new to the process costs more than reading into it, so it is taken once, and
    every batch has the memory of the last but one.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = fresh(num_bytes)

    def end(self, number: int) -> Take:
        """Free all at the first end, or the second where the number is odd; give what takes it."""
        taken_bytes = 0

        def take(num_bytes: int) -> torch.Tensor:
            nonlocal taken_bytes
            before, taken_bytes = taken_bytes, taken_bytes + aligned(num_bytes)
            start = self._memory.numel() - taken_bytes if number % 2 else before
            return self._memory[start : start + num_bytes]

        return take

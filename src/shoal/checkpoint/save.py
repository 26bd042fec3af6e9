"""Saving: plan, write, verify, publish; at once, or in the background of the next steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import torch
import torch.distributed as dist

from shoal.checkpoint.background import (
    PendingSave,
    await_outcome,
    collect_notes,
    leave_note,
    settle,
)
from shoal.checkpoint.data_files import (
    PlannedRegion,
    WrittenFile,
    aligned,
    plan_regions,
    write_regions,
)
from shoal.checkpoint.disk import Folder, checkpoint_at
from shoal.checkpoint.manifest import (
    JSON,
    Manifest,
    StoredRegion,
    TensorEntry,
    check_json,
    file_name,
    fingerprint,
    read_manifest,
    write_manifest,
)
from shoal.checkpoint.ranks import Ranks
from shoal.checkpoint.shares import Share, share_of
from shoal.checkpoint.storage import Checkpoint, storage_errors
from shoal.errors import CheckpointError

TIMEOUT_S = 1800.0
"""How long a rank waits for the others' parts in the background before it gives the save up."""


def save(
    folder: Folder | Checkpoint,
    tensors: Mapping[str, torch.Tensor | Share],
    extra: Mapping[str, JSON],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint named `folder`, which must not exist yet, or be empty.

    Every rank of the group calls this with the same names. A rank writes its part of each sharded
    tensor; plain tensors and `extra` are taken from the first rank. The folder appears when
    everything in it is on the disk; if anything fails on any rank, every rank raises
    `CheckpointError` and no folder of that name is left. A save in the background is waited for,
    and its error is raised here.
    """
    checkpoint = checkpoint_at(folder)
    ranks = Ranks(group)
    settle(ranks)
    shares, planned = ranks.together(lambda: _plan(tensors, extra, ranks.is_first))
    partial = _begin(ranks, checkpoint, shares)
    try:
        written = ranks.gather(ranks.together(lambda: write_regions(partial, ranks.rank, planned)))
        ranks.first(lambda: finish(partial, checkpoint, ranks.size, shares, written, extra))
    except BaseException:
        # By now every rank has stopped writing: `together` waited for all of them.
        if ranks.is_first:
            partial.discard()
        raise


@overload
def async_save(
    folder: Folder,
    tensors: Mapping[str, torch.Tensor | Share],
    extra: Mapping[str, JSON],
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    parents: bool = True,
) -> PendingSave[Path]: ...
@overload
def async_save(
    folder: Checkpoint,
    tensors: Mapping[str, torch.Tensor | Share],
    extra: Mapping[str, JSON],
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    parents: bool = True,
) -> PendingSave[Checkpoint]: ...
def async_save(
    folder: Folder | Checkpoint,
    tensors: Mapping[str, torch.Tensor | Share],
    extra: Mapping[str, JSON],
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    parents: bool = True,
) -> PendingSave[Any]:
    """Copy what `save` would write to host memory, and write it in the background.

    Collective up to the copy, which is of this rank's part and into memory that the next save
    uses again. At most one save is in flight: this waits for the one before, and raises its error
    if it failed. Call `check` on the result in every step, and `wait` at the end. Without `parents`
    the folder that holds checkpoints is not made: it has to be there.
    """
    checkpoint = checkpoint_at(folder)
    ranks = Ranks(group)
    buffer = settle(ranks)

    def copy() -> tuple[dict[str, Share], list[PlannedRegion], torch.Tensor]:
        shares, planned = _plan(tensors, extra, ranks.is_first)
        return shares, *_copied(planned, buffer)

    shares, planned, memory = ranks.together(copy)
    partial = _begin(ranks, checkpoint, shares, parents=parents)
    work = _background(partial, checkpoint, ranks, shares, planned, dict(extra), timeout_s)
    place = folder if isinstance(folder, Checkpoint) else Path(folder)
    return PendingSave(place, ranks, work, memory)


def finish(
    partial: Checkpoint,
    checkpoint: Checkpoint,
    world_size: int,
    shares: Mapping[str, Share],
    written: Sequence[WrittenFile | None],
    extra: Mapping[str, JSON],
) -> None:
    """Put the manifest beside the files, read it back, and publish them."""
    regions: dict[str, list[StoredRegion]] = {name: [] for name in shares}
    files = [file for file in written if file is not None]
    seen: set[object] = set()
    for file in files:
        for region in file.regions:
            # Parts of a mesh may have a tensor alike, as those beside tensor parallelism have. What
            # differs is kept, and refused below: those are two tensors under one name.
            key = region.name, region.region, region.crc32
            if key not in seen:
                seen.add(key)
                regions[region.name].append(region)
    manifest = Manifest(
        world_size=world_size,
        files={file.name: file.file for file in files},
        tensors={name: _entry(name, share, tuple(regions[name])) for name, share in shares.items()},
        extra=extra,
    )
    write_manifest(partial, manifest)
    _check_written(partial, manifest)
    partial.publish(checkpoint)


def _plan(
    tensors: Mapping[str, torch.Tensor | Share], extra: Mapping[str, JSON], is_first: bool
) -> tuple[dict[str, Share], list[PlannedRegion]]:
    """Say what this rank holds and writes, before any byte moves."""
    check_json(extra)
    shares = {name: share_of(name, tensors[name], is_first=is_first) for name in sorted(tensors)}
    return shares, [
        item
        for name, share in shares.items()
        for part in share.parts
        if share.writes
        for item in plan_regions(name, part.region, part.local.dtype, part.view)
    ]


def _begin(
    ranks: Ranks, checkpoint: Checkpoint, shares: Mapping[str, Share], *, parents: bool = True
) -> Checkpoint:
    """Make the partial checkpoint of ranks that save the same tensors. Collective."""
    _check_same(ranks, checkpoint.name, shares)
    name = ranks.first(lambda: checkpoint.create(parents=parents).name)
    return Checkpoint(checkpoint.storage, name)


def _check_same(ranks: Ranks, own_name: str, shares: Mapping[str, Share]) -> None:
    """Raise on all ranks unless they save the same tensors under the same name."""
    mine = [(name, share.shape, str(share.dtype)) for name, share in shares.items()]
    digest = hashlib.blake2b(repr((own_name, mine)).encode(), digest_size=16).hexdigest()
    if len(set(ranks.exchange(digest))) == 1:
        return
    outlines = ranks.exchange((own_name, mine))
    first_name, first = outlines[0]
    for rank, (name, outline) in enumerate(outlines):
        if name != first_name:
            raise CheckpointError(f"rank 0 saves to {first_name!r}, rank {rank} to {name!r}")
        differing = sorted(set(first) ^ set(outline))
        if differing:
            tensor, shape, dtype = differing[0]
            owner, other = (0, rank) if differing[0] in first else (rank, 0)
            raise CheckpointError(
                f"the ranks save different tensors: rank {owner} has {tensor!r} of shape {shape} "
                f"and {dtype}, rank {other} has not; {len(differing)} differ in all"
            )


def _check_written(partial: Checkpoint, manifest: Manifest) -> None:
    """See that what is about to be published reads back as a checkpoint."""
    found = read_manifest(partial)
    if fingerprint(found) != fingerprint(manifest):
        raise CheckpointError(f"the manifest in {partial} does not read back as it was written")
    for name, file in manifest.files.items():
        where = partial.locate(name)
        with storage_errors("find", where), closing(partial.open(name)) as opened:
            size = opened.num_bytes
        if size != file.num_bytes:
            raise CheckpointError(
                f"{where} has {size:,} bytes, and {file.num_bytes:,} were written: "
                "every rank must save to the same file system"
            )


def _entry(name: str, share: Share, regions: tuple[StoredRegion, ...]) -> TensorEntry:
    try:
        return TensorEntry(
            shape=share.shape, dtype=share.dtype, regions=regions, layout=share.layout
        )
    except CheckpointError as error:
        raise CheckpointError(
            f"{name!r}: {error}. All ranks of the tensor's mesh must save together, each once: "
            "pass the group that has exactly those ranks"
        ) from error


def _background(
    partial: Checkpoint,
    checkpoint: Checkpoint,
    ranks: Ranks,
    shares: Mapping[str, Share],
    planned: Sequence[PlannedRegion],
    extra: Mapping[str, JSON],
    timeout_s: float,
) -> Callable[[], None]:
    """Give a rank's work in the background: it uses the storage alone, no collectives."""
    rank, world_size = ranks.rank, ranks.size

    def write() -> None:
        try:
            written = write_regions(partial, rank, planned)
        except BaseException as error:
            # What the unfinished file takes may be all the room that there is for the note. Where
            # even that is too little, the first rank gives up in time; this error counts.
            with suppress(CheckpointError):
                partial.remove(file_name(rank))
            with suppress(CheckpointError):
                leave_note(partial, rank, None, str(error))
            raise
        leave_note(partial, rank, written, None)

    def lead() -> None:
        with partial.discarded_on_error():
            write()
            written = collect_notes(partial, world_size, timeout_s)
            finish(partial, checkpoint, world_size, shares, written, extra)

    def follow() -> None:
        write()
        await_outcome(partial, checkpoint, timeout_s)

    return lead if ranks.is_first else follow


def _copied(
    planned: Sequence[PlannedRegion], buffer: torch.Tensor | None
) -> tuple[list[PlannedRegion], torch.Tensor]:
    """Copy planned regions into one piece of host memory, an old one if it is large enough."""
    *starts, end = accumulate((aligned(item.num_bytes) for item in planned), initial=0)
    sources = [item.read() for item in planned]
    devices = {source.device for source in sources if source.is_cuda}
    if buffer is None or buffer.numel() < end:
        buffer = torch.empty(end, dtype=torch.uint8, pin_memory=bool(devices))
    copies: list[PlannedRegion] = []
    with torch.no_grad():
        for item, source, start in zip(planned, sources, starts, strict=True):
            raw = buffer[start : start + item.num_bytes].view(item.dtype)
            values = raw.view(item.region.sizes)
            values.copy_(source, non_blocking=True)
            copies.append(replace(item, source=lambda _, values=values: values))
    for device in devices:
        torch.cuda.synchronize(device)
    return copies, buffer

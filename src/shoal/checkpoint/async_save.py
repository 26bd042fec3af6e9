"""Saving in the background: the step goes on as soon as the values are copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.checkpoint.agreement import Ranks
from shoal.checkpoint.disk import Folder
from shoal.checkpoint.metadata import JSON, file_name
from shoal.checkpoint.notes import await_outcome, collect_notes, leave_note
from shoal.checkpoint.pending import PendingSave, remember, settle
from shoal.checkpoint.placement import Share
from shoal.checkpoint.publish import discard, open_staging
from shoal.checkpoint.save import check_same, finish, plan_save
from shoal.checkpoint.storage import Block, write_blocks
from shoal.errors import CheckpointError

TIMEOUT_S = 1800.0
"""How long a rank waits for the others' parts in the background before it gives the save up."""

_ALIGNMENT = 64


def async_save(
    folder: Folder,
    tensors: Mapping[str, torch.Tensor | Share],
    extra: Mapping[str, JSON],
    *,
    group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
    parents: bool = True,
) -> PendingSave:
    """Copy what `save` would write to host memory, and write it in the background.

    Collective up to the copy, which is of this rank's part and into memory that the next save
    uses again. At most one save is in flight: this waits for the one before, and raises its error
    if it failed. Call `check` on the result in every step, and `wait` at the end. Without `parents`
    the folder that holds checkpoints is not made: it has to be there.
    """
    folder = Path(folder)
    ranks = Ranks(group)
    buffer = settle(ranks)

    def copy() -> tuple[dict[str, Share], list[Block], torch.Tensor]:
        shares, blocks = plan_save(tensors, extra, ranks.is_first)
        copies, memory = _copied(blocks, buffer)
        return shares, copies, memory

    shares, blocks, memory = ranks.together(copy)
    check_same(ranks, folder.name, shares)
    staging = folder.parent / ranks.first(lambda: open_staging(folder, parents=parents))
    work = _background(staging, folder, ranks, shares, blocks, dict(extra), timeout_s)
    pending = PendingSave(folder, ranks, work, memory)
    remember(ranks, pending)
    return pending


def _background(
    staging: Path,
    folder: Path,
    ranks: Ranks,
    shares: Mapping[str, Share],
    blocks: Sequence[Block],
    extra: Mapping[str, JSON],
    timeout_s: float,
) -> Callable[[], None]:
    """What a rank does in the background; uses the disk alone, no collectives."""
    rank, world_size = ranks.rank, ranks.size

    def write() -> None:
        try:
            written = write_blocks(staging, rank, blocks)
        except BaseException as error:
            # What the unfinished file takes may be all the room that there is for the note. Where
            # even that is too little, the first rank gives up in time; this error counts.
            (staging / file_name(rank)).unlink(missing_ok=True)
            with suppress(CheckpointError):
                leave_note(staging, rank, None, str(error))
            raise
        leave_note(staging, rank, written, None)

    def lead() -> None:
        try:
            write()
            written = collect_notes(staging, world_size, timeout_s)
            finish(staging, folder, world_size, shares, written, extra)
        except BaseException:
            discard(staging)
            raise

    def follow() -> None:
        write()
        await_outcome(staging, folder, timeout_s)

    return lead if ranks.is_first else follow


def _copied(
    blocks: Sequence[Block], buffer: torch.Tensor | None
) -> tuple[list[Block], torch.Tensor]:
    """Copy blocks into one piece of host memory, an old one if it is large enough."""
    starts: list[int] = []
    end = 0
    for block in blocks:
        starts.append(end)
        end += -(-block.num_bytes // _ALIGNMENT) * _ALIGNMENT
    sources = [block.read() for block in blocks]
    devices = {source.device for source in sources if source.is_cuda}
    if buffer is None or buffer.numel() < end:
        buffer = torch.empty(end, dtype=torch.uint8, pin_memory=bool(devices))
    copies: list[Block] = []
    with torch.no_grad():
        for block, source, start in zip(blocks, sources, starts, strict=True):
            raw = buffer[start : start + block.num_bytes].view(block.dtype)
            values = raw.view(block.region.sizes)
            values.copy_(source, non_blocking=True)
            copies.append(_block_of(block, values))
    for device in devices:
        torch.cuda.synchronize(device)
    return copies, buffer


def _block_of(block: Block, values: torch.Tensor) -> Block:
    return Block(name=block.name, region=block.region, dtype=block.dtype, read=lambda: values)

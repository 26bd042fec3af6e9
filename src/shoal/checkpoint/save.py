"""Saving: plan, write, publish."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.checkpoint.agreement import Ranks
from shoal.checkpoint.manifest import write_manifest
from shoal.checkpoint.metadata import JSON, Manifest, StoredRegion, TensorEntry, check_json
from shoal.checkpoint.placement import Share, share_of
from shoal.checkpoint.publish import discard, open_staging, publish
from shoal.checkpoint.storage import Block, blocks_of, write_blocks
from shoal.errors import CheckpointError


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[str, JSON],
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint named `folder`, which must not exist yet.

    Every rank of the group calls this with the same names. A rank writes its part of each sharded
    tensor; plain tensors and `extra` are taken from the first rank. The folder appears when
    everything in it is on the disk; if anything fails on any rank, every rank raises
    `CheckpointError` and no folder of that name is left.
    """
    folder = Path(folder)
    ranks = Ranks(group)
    shares, blocks = ranks.together(lambda: _plan(tensors, extra, ranks.is_first))
    _check_same(ranks, folder.name, shares)
    staging = folder.parent / ranks.first(lambda: open_staging(folder))
    try:
        stored = ranks.together(lambda: write_blocks(staging, ranks.rank, blocks))
        everything = ranks.gather(stored)
        ranks.first(lambda: _finish(staging, folder, ranks.size, shares, everything, extra))
    except BaseException:
        # By now every rank has stopped writing: `together` waited for all of them.
        if ranks.is_first:
            discard(staging)
        raise


def _plan(
    tensors: Mapping[str, torch.Tensor], extra: Mapping[str, JSON], is_first: bool
) -> tuple[dict[str, Share], list[Block]]:
    """Say what this rank holds and writes, before any byte moves."""
    check_json(extra)
    shares = {name: share_of(name, tensors[name], is_first=is_first) for name in sorted(tensors)}
    return shares, [block for name, share in shares.items() for block in blocks_of(name, share)]


def _check_same(ranks: Ranks, folder_name: str, shares: Mapping[str, Share]) -> None:
    """Raise on all ranks unless they save the same tensors under the same name."""
    mine = [(name, share.shape, str(share.dtype)) for name, share in shares.items()]
    digest = hashlib.blake2b(repr((folder_name, mine)).encode(), digest_size=16).hexdigest()
    if len(set(ranks.exchange(digest))) == 1:
        return
    outlines = ranks.exchange((folder_name, mine))
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


def _finish(
    staging: Path,
    folder: Path,
    world_size: int,
    shares: Mapping[str, Share],
    everything: list[list[tuple[str, StoredRegion]]],
    extra: Mapping[str, JSON],
) -> None:
    """Put the manifest beside the files, and publish them."""
    regions: dict[str, list[StoredRegion]] = {name: [] for name in shares}
    for stored in everything:
        for name, region in stored:
            regions[name].append(region)
    manifest = Manifest(
        world_size=world_size,
        tensors={name: _entry(name, share, tuple(regions[name])) for name, share in shares.items()},
        extra=extra,
    )
    write_manifest(staging, manifest)
    publish(staging, folder)


def _entry(name: str, share: Share, regions: tuple[StoredRegion, ...]) -> TensorEntry:
    try:
        return TensorEntry(shape=share.shape, dtype=share.dtype, regions=regions)
    except CheckpointError as error:
        raise CheckpointError(
            f"{name!r}: {error}. All ranks of the tensor's mesh must save together, each once: "
            "pass the group that has exactly those ranks"
        ) from error

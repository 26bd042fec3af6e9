"""Saving: plan, write, verify, publish."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.checkpoint.agreement import Ranks
from shoal.checkpoint.disk import Folder, disk_errors
from shoal.checkpoint.manifest import fingerprint, read_manifest, write_manifest
from shoal.checkpoint.metadata import JSON, Manifest, StoredRegion, TensorEntry, check_json
from shoal.checkpoint.pending import settle
from shoal.checkpoint.placement import Share, share_of
from shoal.checkpoint.publish import discard, open_staging, publish
from shoal.checkpoint.storage import Block, WrittenFile, blocks_of, write_blocks
from shoal.errors import CheckpointError


def save(
    folder: Folder,
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
    folder = Path(folder)
    ranks = Ranks(group)
    settle(ranks)
    shares, blocks = ranks.together(lambda: plan_save(tensors, extra, ranks.is_first))
    check_same(ranks, folder.name, shares)
    staging = folder.parent / ranks.first(lambda: open_staging(folder))
    try:
        written = ranks.gather(ranks.together(lambda: write_blocks(staging, ranks.rank, blocks)))
        ranks.first(lambda: finish(staging, folder, ranks.size, shares, written, extra))
    except BaseException:
        # By now every rank has stopped writing: `together` waited for all of them.
        if ranks.is_first:
            discard(staging)
        raise


def plan_save(
    tensors: Mapping[str, torch.Tensor | Share], extra: Mapping[str, JSON], is_first: bool
) -> tuple[dict[str, Share], list[Block]]:
    """Say what this rank holds and writes, before any byte moves."""
    check_json(extra)
    shares = {name: share_of(name, tensors[name], is_first=is_first) for name in sorted(tensors)}
    return shares, [block for name, share in shares.items() for block in blocks_of(name, share)]


def check_same(ranks: Ranks, folder_name: str, shares: Mapping[str, Share]) -> None:
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


def finish(
    staging: Path,
    folder: Path,
    world_size: int,
    shares: Mapping[str, Share],
    written: Sequence[WrittenFile | None],
    extra: Mapping[str, JSON],
) -> None:
    """Put the manifest beside the files, read it back, and publish them."""
    regions: dict[str, list[StoredRegion]] = {name: [] for name in shares}
    files = [file for file in written if file is not None]
    for file in files:
        for name, region in file.regions:
            regions[name].append(region)
    manifest = Manifest(
        world_size=world_size,
        files={file.name: file.file for file in files},
        tensors={name: _entry(name, share, tuple(regions[name])) for name, share in shares.items()},
        extra=extra,
    )
    write_manifest(staging, manifest)
    _check_written(staging, manifest)
    publish(staging, folder)


def _check_written(staging: Path, manifest: Manifest) -> None:
    """See that what is about to be published reads back as a checkpoint."""
    found = read_manifest(staging)
    if fingerprint(found) != fingerprint(manifest):
        raise CheckpointError(f"the manifest in {staging} does not read back as it was written")
    for name, file in manifest.files.items():
        with disk_errors("find", staging / name):
            size = (staging / name).stat().st_size
        if size != file.num_bytes:
            raise CheckpointError(
                f"{staging / name} has {size:,} bytes, and {file.num_bytes:,} were written: "
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

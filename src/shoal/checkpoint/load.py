"""Loading: compare, verify, and only then copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shoal.checkpoint.agreement import Ranks
from shoal.checkpoint.manifest import fingerprint, read_manifest
from shoal.checkpoint.metadata import JSON, Manifest, StoredRegion, TensorEntry
from shoal.checkpoint.placement import Part, Share, share_of
from shoal.checkpoint.storage import RegionReader
from shoal.errors import CheckpointError
from shoal.layout.region import Region

MOST_NAMES = 3
"""Tensors named in an error for each thing that is wrong with them; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A stored region, the part of it that this rank needs, and where that goes."""

    name: str
    entry: TensorEntry
    stored: StoredRegion
    part: Region
    target: torch.Tensor


def load(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, JSON]:
    """Fill tensors in place from a checkpoint of any number of ranks; return its `extra`.

    Every rank of the group calls this with the same names. A rank reads the regions that overlap
    its own. Names, shapes, dtypes and checksums are compared on all ranks before the first tensor
    is written; whatever is wrong on any rank, every rank raises `CheckpointError`.
    """
    folder = Path(folder)
    ranks = Ranks(group)
    manifest, moves = ranks.together(lambda: _plan(folder, tensors))
    if len(set(ranks.exchange(fingerprint(manifest)))) > 1:
        raise CheckpointError(
            f"the ranks read different checkpoints at {folder}: every rank must see the same "
            "folder, on a shared file system or as the same copy on each host"
        )
    with RegionReader(folder) as reader:
        ranks.together(lambda: _verify(reader, moves))
        ranks.together(lambda: _copy(reader, moves))
    return dict(manifest.extra)


def _plan(folder: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[Manifest, list[Move]]:
    """Read the manifest, and find out what goes where, before any data is touched."""
    manifest = read_manifest(folder)
    shares = {name: share_of(name, tensors[name], is_first=True) for name in sorted(tensors)}
    _check_match(folder, manifest, shares)
    moves = [
        move
        for name, share in shares.items()
        for part in share.parts
        for move in _moves(name, manifest.tensors[name], part)
    ]
    return manifest, moves


def _check_match(folder: Path, manifest: Manifest, shares: Mapping[str, Share]) -> None:
    """Raise one error that names what does not fit, and what to do about it."""
    stored = manifest.tensors
    both = [name for name in shares if name in stored]
    shapes = [
        f"{name!r} is {stored[name].shape} there, {shares[name].shape} here"
        for name in both
        if stored[name].shape != shares[name].shape
    ]
    dtypes = [
        f"{name!r} is {stored[name].dtype} there, {shares[name].dtype} here"
        for name in both
        if stored[name].dtype != shares[name].dtype
    ]
    problems = [
        *_listed("not in the checkpoint", [repr(name) for name in shares if name not in stored]),
        *_listed("only in the checkpoint", [repr(name) for name in stored if name not in shares]),
        *_listed("of another shape", shapes),
        *_listed("of another dtype", dtypes),
    ]
    if problems:
        raise CheckpointError(
            f"{folder} does not fit what it should be loaded into:\n"
            + "\n".join(f"  {problem}" for problem in problems)
            + "\nBuild the model and optimizer as they were when it was saved, or load another one"
        )


def _listed(what: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = f"; and {len(items) - MOST_NAMES} more" if len(items) > MOST_NAMES else ""
    return [f"{len(items)} {what}: {'; '.join(items[:MOST_NAMES])}{more}"]


def _moves(name: str, entry: TensorEntry, held: Part) -> list[Move]:
    """Find the stored regions that hold what this rank needs; together they hold all of it."""
    moves: list[Move] = []
    for stored in entry.regions:
        overlap = stored.region.overlap(held.region)
        if overlap is not None:
            target = held.local[overlap.relative_to(held.region).slices]
            part = overlap.relative_to(stored.region)
            moves.append(Move(name=name, entry=entry, stored=stored, part=part, target=target))
    found = sum(move.part.numel for move in moves)
    if found != held.region.numel:
        raise CheckpointError(
            f"tensor {name!r}: the checkpoint's regions hold {found:,} elements for "
            f"{held.region}, which has {held.region.numel:,}; the manifest is inconsistent"
        )
    return moves


def _verify(reader: RegionReader, moves: list[Move]) -> None:
    for move in moves:
        reader.verify(move.name, move.entry, move.stored)


def _copy(reader: RegionReader, moves: list[Move]) -> None:
    with torch.no_grad():
        for move in moves:
            values = reader.read(move.name, move.entry, move.stored)
            move.target.copy_(values[move.part.slices])

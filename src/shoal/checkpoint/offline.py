"""Checkpoints made from other files by one process, without ranks or a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from shoal.checkpoint.data_files import (
    PlannedRegion,
    Progress,
    RegionReader,
    plan_regions,
    write_regions,
)
from shoal.checkpoint.disk import Folder, checkpoint_at
from shoal.checkpoint.load_plan import moves_into
from shoal.checkpoint.manifest import JSON, Manifest, TensorEntry, read_manifest
from shoal.checkpoint.save import finish
from shoal.checkpoint.shares import Part, Share
from shoal.checkpoint.storage import Checkpoint
from shoal.errors import UsageError
from shoal.layout.chunk import chunk_region
from shoal.layout.region import Region


def verify(folder: Folder | Checkpoint, progress: Progress | None = None) -> Manifest:
    """Compare every byte of a checkpoint with its checksums; raises CheckpointError."""
    checkpoint = checkpoint_at(folder)
    manifest = read_manifest(checkpoint)
    with RegionReader(checkpoint, manifest) as reader:
        for name in manifest.files:
            reader.open_file(name)
        for entry in manifest.tensors.values():
            for stored in entry.regions:
                reader.verify(stored)
                if progress is not None:
                    progress(stored.num_bytes)
    return manifest


def reshard(
    source: Folder | Checkpoint,
    folder: Folder | Checkpoint,
    num_files: int,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint anew, cut along the first dim for that many ranks.

    Any number of ranks loads any checkpoint; one that is cut for them reads each file once.
    """
    if num_files < 1:
        raise UsageError(f"expected a number of ranks of 1 or more, got {num_files}")
    source = checkpoint_at(source)
    manifest = read_manifest(source)
    with RegionReader(source, manifest) as reader:
        files = [
            [
                item
                for name, entry in manifest.tensors.items()
                for item in _planned(reader, name, entry, num_files, rank)
            ]
            for rank in range(num_files)
        ]
        outlines = {
            name: outline(entry.shape, entry.dtype, f"cut for {num_files} ranks")
            for name, entry in manifest.tensors.items()
        }
        write_offline(checkpoint_at(folder), outlines, files, manifest.extra, progress)


def outline(shape: Sequence[int], dtype: torch.dtype, layout: str) -> Share:
    """Say what a tensor is, without holding any of it."""
    return Share(shape=tuple(shape), dtype=dtype, parts=(), writes=False, layout=layout)


def write_offline(
    checkpoint: Checkpoint,
    outlines: Mapping[str, Share],
    files: Sequence[Sequence[PlannedRegion]],
    extra: Mapping[str, JSON],
    progress: Progress | None,
) -> None:
    """Write, verify and publish a checkpoint of which each region is fetched when it is written."""
    with checkpoint.create().discarded_on_error() as unfinished:
        written = [
            write_regions(unfinished, rank, planned, progress) for rank, planned in enumerate(files)
        ]
        finish(unfinished, checkpoint, len(files), outlines, written, extra)


def read_region(
    reader: RegionReader, name: str, entry: TensorEntry, region: Region
) -> torch.Tensor:
    """Put a region of a tensor together from the stored ones, all of them checked."""
    values = torch.empty(region.sizes, dtype=entry.dtype)
    for move in moves_into(name, entry, [Part(region=region, local=values)]):
        move.read(reader)()
    return values


def _planned(
    reader: RegionReader, name: str, entry: TensorEntry, num_files: int, rank: int
) -> Iterable[PlannedRegion]:
    """Cut a tensor along its first dim; a single element cannot be cut: the first file has it."""
    region = Region.whole(entry.shape)
    if entry.shape:
        region = chunk_region(region, num_files, rank, 0)
    elif rank > 0:
        return ()
    return plan_regions(name, region, entry.dtype, partial(read_region, reader, name, entry))

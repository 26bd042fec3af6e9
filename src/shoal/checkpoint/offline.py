"""Checkpoints made from other files by one process, without ranks or a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from shoal.checkpoint.data_files import PlannedRegion, RegionReader, cut_region, write_regions
from shoal.checkpoint.disk import Folder, checkpoint_at
from shoal.checkpoint.load_plan import moves_into
from shoal.checkpoint.manifest import JSON, Manifest, TensorEntry, read_manifest
from shoal.checkpoint.save import finish
from shoal.checkpoint.shares import Part, Share
from shoal.checkpoint.storage import Checkpoint
from shoal.errors import UsageError
from shoal.layout.chunk import chunk_region
from shoal.layout.region import Region

Progress = Callable[[int], object]
"""Told the number of bytes that were dealt with since it was last told."""


def verify(folder: Folder | Checkpoint, progress: Progress | None = None) -> Manifest:
    """Compare every byte of a checkpoint with its checksums; raises CheckpointError."""
    checkpoint = checkpoint_at(folder)
    manifest = read_manifest(checkpoint)
    with RegionReader(checkpoint, manifest) as reader:
        for name in manifest.files:
            reader.check_file(name)
        for name, entry in manifest.tensors.items():
            for stored in entry.regions:
                reader.verify(name, entry, stored)
                if progress is not None:
                    progress(stored.region.numel * entry.dtype.itemsize)
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
                for item in _planned(reader, name, entry, _chunk(entry, num_files, rank), progress)
            ]
            for rank in range(num_files)
        ]
        outlines = {
            name: outline(entry.shape, entry.dtype, f"cut for {num_files} ranks")
            for name, entry in manifest.tensors.items()
        }
        write_offline(checkpoint_at(folder), outlines, files, manifest.extra)


def outline(shape: Sequence[int], dtype: torch.dtype, layout: str) -> Share:
    """Say what a tensor is, without holding any of it."""
    return Share(shape=tuple(shape), dtype=dtype, parts=(), writes=False, layout=layout)


def write_offline(
    checkpoint: Checkpoint,
    outlines: Mapping[str, Share],
    files: Sequence[Sequence[PlannedRegion]],
    extra: Mapping[str, JSON],
) -> None:
    """Write, verify and publish a checkpoint of which each region is fetched when it is written."""
    partial = checkpoint.create()
    try:
        written = [write_regions(partial, rank, planned) for rank, planned in enumerate(files)]
        finish(partial, checkpoint, len(files), outlines, written, extra)
    except BaseException:
        partial.discard()
        raise


def read_region(
    reader: RegionReader, name: str, entry: TensorEntry, region: Region
) -> torch.Tensor:
    """Put a region of a tensor together from the stored ones, all of them checked."""
    values = torch.empty(region.sizes, dtype=entry.dtype)
    for move in moves_into(name, entry, [Part(region=region, local=values)]):
        move.read(reader)()
    return values


def _chunk(entry: TensorEntry, num_files: int, rank: int) -> Region | None:
    whole = Region.whole(entry.shape)
    if entry.shape:
        return chunk_region(whole, num_files, rank, 0)
    # A single element cannot be cut: the first file has it.
    return whole if rank == 0 else None


def _planned(
    reader: RegionReader,
    name: str,
    entry: TensorEntry,
    chunk: Region | None,
    progress: Progress | None,
) -> Iterator[PlannedRegion]:
    for region in () if chunk is None else cut_region(name, chunk, entry.dtype):

        def read(region: Region = region) -> torch.Tensor:
            if progress is not None:
                progress(region.numel * entry.dtype.itemsize)
            return read_region(reader, name, entry, region)

        yield PlannedRegion(name=name, region=region, dtype=entry.dtype, read=read)

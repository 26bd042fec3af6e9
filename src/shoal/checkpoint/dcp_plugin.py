"""Our files behind `torch.distributed.checkpoint`: its planners, and what users call, stay.

    dcp.save(state, storage_writer=DcpWriter(folder))
    dcp.load(state, storage_reader=DcpReader(folder))

The folder is a checkpoint of ours, with its checksums, and appears all at once. DCP pickles values
that are no tensors; here they must be such as JSON can hold, where a tuple becomes a list.
"""

from __future__ import annotations

import dataclasses
import io
import os
import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from shoal.checkpoint.data_files import (
    PlannedRegion,
    RegionReader,
    WrittenFile,
    plan_regions,
    write_regions,
)
from shoal.checkpoint.dcp_import import read_item
from shoal.checkpoint.disk import Folder, checkpoint_at
from shoal.checkpoint.manifest import Manifest, StoredRegion, TensorEntry, check_json, read_manifest
from shoal.checkpoint.offline import outline
from shoal.checkpoint.save import finish
from shoal.checkpoint.shares import Part
from shoal.checkpoint.storage import Checkpoint
from shoal.errors import CheckpointError, UsageError
from shoal.layout.region import Region

_VALUES, _PATHS = "values", "paths"
_MAX_STEPS = 100
"""Of the path to a value in a state dict."""

_Outcome = tuple[dict[str, Any], WrittenFile | None]
"""A rank's values by name, and the file that it wrote; the coordinator is given these."""

T = TypeVar("T")


class _InFolder:
    """Names a checkpoint by the path that it is given, or by DCP's `checkpoint_id`."""

    def __init__(self, path: Folder | Checkpoint | None = None) -> None:
        self._folder = path

    def reset(self, checkpoint_id: Folder | Checkpoint | None = None) -> None:
        """Begin another save or load, in another folder if one is named."""
        if checkpoint_id is not None:
            self._folder = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any local path is one."""
        return "://" not in str(checkpoint_id)

    @property
    def _checkpoint(self) -> Checkpoint:
        if self._folder is None:
            raise UsageError("name the folder, here or as DCP's checkpoint_id")
        return checkpoint_at(self._folder)


class DcpWriter(_InFolder, StorageWriter):
    """Writes what a DCP planner plans as a checkpoint, to a folder that is new or empty.

    DCP tells no writer of a save that failed before its turn, as when `finish_plan` of the planner
    raised on one rank. What such a save has left goes with the writer, or with its next save.
    """

    _gives_up: weakref.finalize[..., Any] | None = None
    """Discards the partial checkpoint that is being written, on the coordinator."""

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_gives_up"}

    def reset(self, checkpoint_id: Folder | Checkpoint | None = None) -> None:
        """Begin another save, in another folder if one is named."""
        if self._gives_up is not None:
            self._gives_up()
        super().reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing depends on the role: the coordinator alone is asked to plan globally."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing is written before all ranks have planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the partial checkpoint, and tell each rank its number and where to write."""
        partial = self._checkpoint.create()
        self._partial = partial.name
        self._gives_up = weakref.finalize(self, _discard, partial, os.getpid())
        return [
            dataclasses.replace(plan, storage_data=(self._partial, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; the only result says what it wrote, or why it could not.

        DCP would raise an error at once, without a call to `finish`, and the partial checkpoint
        would stay.
        """
        try:
            outcome = self._write(plan, planner)
        except BaseException as error:
            outcome = error
        return _done([WriteResult(MetadataIndex(""), size_in_bytes=0, storage_data=outcome)])

    def _write(self, plan: SavePlan, planner: SavePlanner) -> _Outcome:
        name, rank = plan.storage_data
        values: dict[str, Any] = {}
        planned: list[PlannedRegion] = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                values[item.index.fqn] = _value(item, planner)
            else:
                planned += _planned(item, planner)
        return values, write_regions(Checkpoint(self._checkpoint.storage, name), rank, planned)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, and publish; DCP calls this on the coordinator.

        Raises the error of the first rank that failed. No rank writes any more by now.
        """
        if self._gives_up is not None:
            self._gives_up.detach()
        outcomes = [result.storage_data for [result] in results]
        with Checkpoint(self._checkpoint.storage, self._partial).discarded_on_error() as partial:
            for rank, outcome in enumerate(outcomes):
                if isinstance(outcome, BaseException):
                    outcome.add_note(f"on rank {rank}")
                    raise outcome
            values = {name: value for own, _ in outcomes for name, value in own.items()}
            paths = {name: list(path) for name, path in (metadata.planner_data or {}).items()}
            outlines = {
                name: outline(entry.size, entry.properties.dtype, "by DCP")
                for name, entry in metadata.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            files = [file for _, file in outcomes]
            extra = {_VALUES: values, _PATHS: paths}
            finish(partial, self._checkpoint, len(outcomes), outlines, files, extra)


class DcpReader(_InFolder, StorageReader):
    """Reads a checkpoint of ours for a DCP planner; no region is written before it is checked."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Say what the manifest says, as DCP says it."""
        manifest = read_manifest(self._checkpoint)
        values, paths = _values(manifest), _paths(manifest)
        entries: dict[str, Any] = {name: _entry(e) for name, e in manifest.tensors.items()}
        entries |= {name: BytesStorageMetadata() for name in values}
        return Metadata(state_dict_metadata=entries, planner_data=paths)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Read the manifest on this rank too: DCP passes its own metadata only."""
        self._manifest = read_manifest(self._checkpoint)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep DCP's plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Keep DCP's plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, check and copy each region that the plan asks for."""
        manifest = self._manifest
        values = _values(manifest)
        stored = {
            (region.name, region.region.offsets): region
            for entry in manifest.tensors.values()
            for region in entry.regions
        }
        with RegionReader(self._checkpoint, manifest) as reader, torch.no_grad():
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    data = io.BytesIO()
                    torch.save(values[item.storage_index.fqn], data)
                    data.seek(0)
                    planner.load_bytes(item, data)
                else:
                    _fill(reader, stored, item, planner)
        return _done(None)


def _discard(partial: Checkpoint, pid: int) -> None:
    """Remove what a save has left, but not from a child process that has a copy of the writer."""
    if os.getpid() == pid:
        partial.discard()


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _values(manifest: Manifest) -> dict[str, Any]:
    """The values beside the tensors; a checkpoint from elsewhere may hold anything there."""
    values = _table(manifest, _VALUES)
    both = sorted(values.keys() & manifest.tensors.keys())
    if both:
        raise CheckpointError(f"{both[0]!r:.200} is both a value and a tensor in the checkpoint")
    return values


def _paths(manifest: Manifest) -> dict[str, tuple[str | int, ...]]:
    """The path of each value in the state dict; raises if its lists would be too long."""
    paths = _table(manifest, _PATHS)
    lengths: dict[tuple[str | int, ...], int] = {}
    found: dict[str, tuple[str | int, ...]] = {}
    for name, path in paths.items():
        found[name] = _path(name, path)
        for at, step in enumerate(found[name]):
            if isinstance(step, int):
                before = found[name][:at]
                lengths[before] = max(lengths.get(before, 0), step + 1)
    # Places that hold nothing, such as an empty table, have no path.
    if sum(lengths.values()) > 16 * len(paths) + 1024:
        raise CheckpointError("its paths lead through lists that are longer than all they hold")
    return found


def _table(manifest: Manifest, key: str) -> dict[str, Any]:
    table = manifest.extra.get(key, {})
    if not isinstance(table, dict):
        raise CheckpointError(f"expected a table of {key}, got {table!r:.100}")
    return table


def _path(name: str, path: object) -> tuple[str | int, ...]:
    steps: list[Any] = path if isinstance(path, list) and 0 < len(path) <= _MAX_STEPS else [None]
    if any(type(step) is not str and (type(step) is not int or step < 0) for step in steps):
        raise CheckpointError(f"expected the path of {name!r:.200}, got {path!r:.100}")
    return tuple(steps)


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    """A value that DCP has pickled already, as it was before."""
    data = planner.resolve_data(item)
    value = read_item(data.getvalue()) if isinstance(data, io.BytesIO) else data
    check_json(value, f"the value {item.index.fqn!r}")
    return value


def _planned(item: WriteItem, planner: SavePlanner) -> Iterator[PlannedRegion]:
    values: Any = planner.resolve_data(item)
    chunk = item.tensor_data.chunk if item.tensor_data is not None else None
    offsets = tuple(chunk.offsets) if chunk is not None else (0,) * values.dim()
    part = Part(region=Region(offsets=offsets, sizes=tuple(values.shape)), local=values)
    return plan_regions(item.index.fqn, part.region, values.dtype, part.view)


def _entry(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(r.region.offsets), torch.Size(r.region.sizes))
        for r in entry.regions
    ]
    properties = TensorProperties(dtype=entry.dtype)
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)


def _fill(
    reader: RegionReader,
    stored: dict[tuple[str, tuple[int, ...]], StoredRegion],
    item: ReadItem,
    planner: LoadPlanner,
) -> None:
    region = stored[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
    part = Region(offsets=tuple(item.storage_offsets), sizes=tuple(item.lengths))
    [values] = reader.read(region, [part])
    target = planner.resolve_tensor(item).detach()
    target.copy_(values)
    planner.commit_tensor(item, target)

"""torch.distributed.checkpoint: what any kind of tensor saved loads into any other, bit for bit."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor as torch_tensor
from torch.distributed.checkpoint.default_planner import (
    _create_default_local_metadata as local_metadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from cuts import sharded
from harness import on_ranks, ranks
from sharded_api import OURS, TORCHS, Api
from shoal.layout import Block, Flat, Layout, ParamSpec, Rows, Whole
from shoal.sharded_tensor import init_from_local_shards, state_dict_hook
from shoal.tensor import Packed, ShardedTensor

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")

LAYOUTS: dict[str, Layout] = {
    "flat": Flat(),
    "rows": Rows(),
    "block": Block(5),
    "whole": Whole(),
}
KINDS = [*LAYOUTS, "chunks", "columns", "list", "torch chunks", "torch list", "dtensor", "plain"]

VALUES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "matrix": ((13, 10), torch.float32),
    "short": ((3, 4), torch.bfloat16),
    "vector": ((17,), torch.int64),
    "block": ((4, 3, 6), torch.complex64),
    "nothing": ((0, 4), torch.float32),
    "number": ((), torch.float64),
}


def whole(name: str) -> torch.Tensor:
    shape, dtype = VALUES[name]
    generator = torch.Generator().manual_seed(len(name))
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def listed(values: torch.Tensor, api: Api, places: list[int]) -> Any:
    """Row by row, dealt out to ranks in any order; no row is two shards."""
    rest = [0] * (values.dim() - 1)
    shards = [
        api.shard(values[[row]].clone(), [row, *rest], dist.get_rank())
        for row, place in enumerate(places)
        if place == dist.get_rank()
    ]
    return api.tensor.init_from_local_shards(shards, *values.shape)


def make(kind: str, values: torch.Tensor) -> torch.Tensor:
    """The tensor of one kind; those that a kind cannot cut are plain."""
    size, values = dist.get_world_size(), values.clone()
    if kind in LAYOUTS:
        return sharded([values], LAYOUTS[kind])[0]
    if kind == "plain" or not values.numel() or not values.dim():
        return values
    if kind == "dtensor":
        return distribute_tensor(values, init_device_mesh("cpu", (size,)), [Shard(0)])
    api = TORCHS if kind.startswith("torch") else OURS
    if kind.endswith("list"):
        return listed(values, api, [(row * 5 + 1) % size for row in range(values.shape[0])])
    spec = api.chunks(values.dim() - 1 if kind == "columns" else 0, [*range(size)])
    tensor = api.tensor.empty(spec, values.shape, dtype=values.dtype)
    for shard in tensor.local_shards():
        offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(
            values[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        )
    return tensor


def read(tensor: Any) -> torch.Tensor:
    """The whole of any kind of tensor, on every rank."""
    if isinstance(tensor, (DTensor, ShardedTensor)):
        return tensor.full_tensor()
    if not isinstance(tensor, torch_tensor.ShardedTensor):
        return tensor
    found = torch.zeros(tensor.shape, dtype=tensor.dtype)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        parts, [(s.metadata.shard_offsets, s.tensor) for s in tensor.local_shards()]
    )
    for part in parts:
        for offsets, piece in part:
            where = zip(offsets, piece.shape, strict=True)
            found[tuple(slice(o, o + s) for o, s in where)] = piece
    return found


def save(folder: Path, kind: str) -> None:
    tensors = {name: make(kind, whole(name)) for name in VALUES}
    dcp.save(tensors, checkpoint_id=folder)


def load(folder: Path) -> None:
    for kind in KINDS:
        tensors = {name: make(kind, torch.zeros_like(whole(name))) for name in VALUES}
        before = dict(tensors)
        dcp.load(tensors, checkpoint_id=folder)
        for name, tensor in tensors.items():
            assert tensor is before[name], "loaded in place"
            assert torch.equal(read(tensor), whole(name)), (kind, name)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_kind_loads_into_any_other_on_another_number_of_ranks(
    tmp_path: Path, kind: str, before: int, after: int
) -> None:
    on_ranks(before, save, tmp_path, kind)
    on_ranks(after, load, tmp_path)


@ranks(4)
def test_every_element_is_written_once(tmp_path: Path) -> None:
    for kind in (*LAYOUTS, "chunks", "list"):
        save(tmp_path / kind, kind)
        metadata = dcp.FileSystemReader(tmp_path / kind).read_metadata().state_dict_metadata
        for name, (shape, dtype) in VALUES.items():
            entry = metadata[name]
            assert isinstance(entry, TensorStorageMetadata)
            assert (entry.size, entry.properties.dtype) == (shape, dtype)
            numels = [chunk.sizes.numel() for chunk in entry.chunks]
            assert sum(numels) == whole(name).numel(), (kind, name)
            assert len(set(map(str, entry.chunks))) == len(entry.chunks)


@ranks(4)
def test_of_replicas_the_first_writes(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group, replica = mesh.get_group("shard"), mesh.get_local_rank("replicate")
    values = whole("matrix")
    packing = Flat().pack([ParamSpec.of("x", values)], 2)
    placement = Packed(packing=packing, index=0, group=group, rank=group.rank(), replica=replica)
    packed = ShardedTensor.of(torch.zeros(placement.piece.shape), placement)
    packed.copy_(values)
    from_mesh = ShardedTensor.from_dtensor(distribute_tensor(values, mesh, [Replicate(), Shard(0)]))
    tensors: dict[str, Any] = {"packed": packed, "from_mesh": from_mesh}
    for name, tensor in tensors.items():
        assert bool(tensor.__create_write_items__(name, tensor)) == (replica == 0)
    dcp.save(tensors, checkpoint_id=tmp_path)
    for tensor in tensors.values():
        tensor.zero_()
    dcp.load(tensors, checkpoint_id=tmp_path)
    for tensor in tensors.values():
        assert torch.equal(tensor.full_tensor(), values)


class Holder(nn.Module):
    def __init__(self, api: Api) -> None:
        super().__init__()
        self.table = api.tensor.rand(api.chunks(0, [*range(dist.get_world_size())]), 5, 3)
        self.scale = nn.Parameter(torch.rand(2))
        self._register_state_dict_hook(state_dict_hook)


@ranks(2)
def test_state_dicts_with_the_hook(tmp_path: Path) -> None:
    holders = [Holder(TORCHS), Holder(OURS), Holder(TORCHS)]
    expected = read(holders[0].table)
    for index, (saves, loads) in enumerate(pairwise(holders)):
        state = saves.state_dict()
        assert [*state] == ["scale", "table"]
        dcp.save(state, checkpoint_id=tmp_path / str(index))
        target = loads.state_dict()
        dcp.load(target, checkpoint_id=tmp_path / str(index))
        assert torch.equal(read(loads.table), expected)


@ranks(2)
def test_asynchronous_saves_copy_first(tmp_path: Path) -> None:
    tensors = {kind: make(kind, whole("matrix")) for kind in ("flat", "list", "chunks")}
    saving: Any = dcp.async_save(tensors, checkpoint_id=tmp_path)
    for tensor in tensors.values():
        tensor.zero_()
    saving.result()
    dcp.load(tensors, checkpoint_id=tmp_path)
    for kind, tensor in tensors.items():
        assert torch.equal(read(tensor), whole("matrix")), kind


@ranks(2)
def test_metadata_and_lookup_are_torchs() -> None:
    """What torch's planners ask of its own class, they find in ours."""
    rank = dist.get_rank()
    shards = [OURS.shard(torch.rand(8), [16 * rank + 8 * i], rank) for i in range(2)]
    state = {"x": init_from_local_shards(shards, 32)}
    assert isinstance(state["x"], torch_tensor.ShardedTensor)
    chunks = local_metadata(state).state_dict_metadata["x"].chunks  # pyright: ignore
    assert [chunk.offsets[0] for chunk in chunks] == [0, 8, 16, 24]
    for hint in (None, 0, 99):
        found = find_state_dict_object(state, MetadataIndex("x", [16 * rank + 8], hint))
        assert found.data_ptr() == shards[1].tensor.data_ptr()
    with pytest.raises(ValueError, match="no offset was provided"):
        find_state_dict_object(state, MetadataIndex("x"))
    with pytest.raises(ValueError, match="Could not find shard"):
        find_state_dict_object(state, MetadataIndex("x", [1]))

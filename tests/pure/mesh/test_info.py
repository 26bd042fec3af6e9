"""Mesh infos beside torch's own, on the same meshes."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as oracle

from shoal.errors import MeshError
from shoal.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    device_of,
    own_mesh_info,
)

SHARD = ("shard_mesh_dim", "shard_mesh_size", "shard_mesh_rank", "shard_process_group")
REPLICATE = tuple(name.replace("shard", "replicate") for name in SHARD)


def assert_same(ours: object, theirs: object, names: tuple[str, ...]) -> None:
    for name in ("mesh", *names):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("rank", [0, 3, 7])
def test_sizes_ranks_and_groups_are_torchs(join_world, rank: int) -> None:
    join_world(rank, 8)
    line = init_device_mesh("cpu", (8,))
    grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    assert_same(FSDPMeshInfo(line, 0), oracle.FSDPMeshInfo(line, 0), SHARD)
    assert_same(
        DDPMeshInfo(line, replicate_mesh_dim=0),
        oracle.DDPMeshInfo(line, replicate_mesh_dim=0),
        REPLICATE,
    )
    assert_same(HSDPMeshInfo(grid, 1, 0), oracle.HSDPMeshInfo(grid, 1, 0), SHARD + REPLICATE)
    assert_same(FSDPMeshInfo(grid, 0), oracle.FSDPMeshInfo(grid, 0), SHARD)
    assert HSDPMeshInfo(grid, 1, 0).shard_mesh_rank == rank % 4
    assert HSDPMeshInfo(grid, 1, 0).replicate_mesh_rank == rank // 4


def test_classes_are_related_as_torchs_are() -> None:
    ours = [DataParallelMeshInfo, FSDPMeshInfo, DDPMeshInfo, HSDPMeshInfo]
    for a in ours:
        for b in ours:
            theirs = (getattr(oracle, a.__name__), getattr(oracle, b.__name__))
            assert issubclass(a, b) == issubclass(*theirs)


def test_infos_are_values(join_world) -> None:
    join_world(0, 8)
    grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    info = HSDPMeshInfo(grid, shard_mesh_dim=1, replicate_mesh_dim=0)
    assert info == HSDPMeshInfo(grid, 1, 0)
    assert hash(info) == hash(HSDPMeshInfo(grid, 1, 0))
    assert info != HSDPMeshInfo(grid, 0, 1)
    assert info != DataParallelMeshInfo(grid, 1, 0)
    for name in ("mesh", "shard_mesh_size", "replicate_process_group"):
        with pytest.raises(FrozenInstanceError):
            setattr(info, name, None)


def test_what_cannot_work_cannot_be_built(join_world) -> None:
    join_world(0, 8)
    line = init_device_mesh("cpu", (8,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    dims = DataParallelMeshDims(shard="dp")
    for call in (
        lambda: FSDPMeshInfo(line, 1),
        lambda: FSDPMeshInfo(line, -1),
        lambda: FSDPMeshInfo(line, "dp"),  # pyright: ignore[reportArgumentType]
        lambda: FSDPMeshInfo(line, True),
        lambda: FSDPMeshInfo("cpu", 0),  # pyright: ignore[reportArgumentType]
        lambda: DDPMeshInfo(line, replicate_mesh_dim=1),
        lambda: HSDPMeshInfo(grid, 1, 1),
        lambda: HSDPMeshInfo(grid, 1, 2),
        lambda: FSDPMeshInfo(grid, 1, 0),
        lambda: DDPMeshInfo(grid, 1, 0),
        lambda: FSDPMeshInfo(line, 0, dp_mesh_dims=dims),
        lambda: FSDPMeshInfo(line, 0, spmd_mesh=line),
        lambda: FSDPMeshInfo(line, 0, dp_mesh_dims=dims, spmd_mesh=grid),
    ):
        with pytest.raises(MeshError):
            call()


@pytest.mark.parametrize("module", ["ours", "torch"])
def test_a_missing_axis_is_answered_as_torch_does(join_world, module: str) -> None:
    join_world(0, 4)
    mesh = init_device_mesh("cpu", (4,))
    classes = (
        (DataParallelMeshInfo, FSDPMeshInfo, DDPMeshInfo, HSDPMeshInfo)
        if module == "ours"
        else (
            oracle.DataParallelMeshInfo,
            oracle.FSDPMeshInfo,
            oracle.DDPMeshInfo,
            oracle.HSDPMeshInfo,
        )
    )
    base, fsdp, ddp, hsdp = classes
    for call in (
        lambda: base(mesh),
        lambda: fsdp(mesh, replicate_mesh_dim=0),
        lambda: ddp(mesh, shard_mesh_dim=0),
        lambda: hsdp(mesh, shard_mesh_dim=0),
        lambda: hsdp(mesh, replicate_mesh_dim=0),
    ):
        with pytest.raises(AssertionError):
            call()


def test_a_rank_outside_of_the_mesh_is_told_so(join_world) -> None:
    join_world(5, 8)
    mesh = DeviceMesh("cpu", torch.arange(4))
    with pytest.raises(MeshError, match="rank 5 is not part of"):
        FSDPMeshInfo(mesh, 0)


def test_a_separate_reduce_group_must_have_the_same_ranks(join_world) -> None:
    join_world(0, 4)
    info = FSDPMeshInfo(init_device_mesh("cpu", (4,)), 0)
    assert info.reduce_scatter_process_group is None
    same, other = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1])
    info = replace(info, reduce_scatter_process_group=same)
    assert info.reduce_scatter_process_group is same
    with pytest.raises(MeshError, match=r"ranks \[0, 1, 2, 3\]"):
        replace(info, reduce_scatter_process_group=other)


def test_the_device_of_a_cpu_mesh_is_the_cpu(join_world) -> None:
    join_world(0, 2)
    assert device_of(init_device_mesh("cpu", (2,))) == torch.device("cpu")


def test_mesh_infos_of_torch_become_ours(join_world) -> None:
    join_world(0, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ours = own_mesh_info(oracle.HSDPMeshInfo(mesh, 1, 0))
    assert ours == HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    line = mesh["shard"]
    assert own_mesh_info(oracle.FSDPMeshInfo(line, 0)) == FSDPMeshInfo(line, 0)
    own = FSDPMeshInfo(line, 0)
    assert own_mesh_info(own) is own
    for info in (DDPMeshInfo(line, replicate_mesh_dim=0), None, mesh):
        with pytest.raises(MeshError, match="expected an FSDPMeshInfo"):
            own_mesh_info(info)

"""Meshes and what is made of them, beside torch's own on the same meshes."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_common as oracle
from torch.distributed.fsdp._fully_shard import _fsdp_init as oracle_functions

from shoal.errors import MeshError
from shoal.mesh import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    default_mesh,
    mesh_info_of,
    post_forward_mesh_info,
    validate_mesh,
)

needs_named_dims = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"),
    reason="this torch has no DataParallelMeshDims to compare with",
)


def assert_same(ours: DataParallelMeshInfo | None, theirs: object) -> None:
    """Equal class, and equal attributes as far as both have them."""
    assert (ours is None) == (theirs is None)
    if ours is None:
        return
    assert type(ours).__name__ == type(theirs).__name__
    names = [field.name for field in fields(ours) if hasattr(theirs, field.name)]
    assert "mesh" in names
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name


def cube() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 4), mesh_dim_names=("pod", "dp", "tp"))


@pytest.mark.parametrize("rank", [0, 5])
def test_axes_by_number(join_world, rank: int) -> None:
    join_world(rank, 8)
    line = init_device_mesh("cpu", (8,))
    grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    assert_same(mesh_info_of(line), oracle.FSDPMeshInfo(line, 0))
    assert_same(mesh_info_of(grid), oracle.HSDPMeshInfo(grid, 1, 0))


@needs_named_dims
@pytest.mark.parametrize("rank", [0, 7, 13])
@pytest.mark.parametrize(
    ("dims", "kind"),
    [
        (DataParallelMeshDims(shard="dp"), FSDPMeshInfo),
        (DataParallelMeshDims(shard=("pod", "dp")), FSDPMeshInfo),
        (DataParallelMeshDims(replicate="dp"), DDPMeshInfo),
        (DataParallelMeshDims(replicate=("pod", "dp")), DDPMeshInfo),
        (DataParallelMeshDims(shard="dp", replicate="pod"), HSDPMeshInfo),
        (DataParallelMeshDims(shard="pod", replicate="dp"), HSDPMeshInfo),
        (DataParallelMeshDims(shard=("dp", "tp"), replicate="pod"), HSDPMeshInfo),
    ],
    ids=str,
)
def test_axes_by_name(join_world, rank: int, dims: DataParallelMeshDims, kind: type) -> None:
    join_world(rank, 16)
    mesh = cube()
    info = mesh_info_of(mesh, dims)
    assert type(info) is kind
    assert info.is_spmd_mesh
    assert info.spmd_mesh is mesh
    assert_same(info, oracle_functions._get_mesh_info(mesh, dims))


def test_several_named_axes_act_as_one(join_world) -> None:
    join_world(6, 16)
    info = mesh_info_of(cube(), DataParallelMeshDims(shard=("pod", "dp")))
    assert isinstance(info, FSDPMeshInfo)
    assert info.shard_mesh_size == 4
    assert dist.get_process_group_ranks(info.shard_process_group) == [2, 6, 10, 14]
    assert info.shard_mesh_rank == 1


def test_a_wrong_mesh_is_refused_before_groups_are_made(join_world) -> None:
    join_world(0, 16)
    mesh = cube()
    flat = DeviceMesh("cpu", torch.arange(16).view(4, 4))
    for call in (
        lambda: validate_mesh(mesh),
        lambda: validate_mesh("cpu"),  # pyright: ignore[reportArgumentType]
        lambda: mesh_info_of(mesh),
        lambda: mesh_info_of(flat),
        lambda: mesh_info_of(flat, DataParallelMeshDims(shard="dp")),
        lambda: mesh_info_of(mesh, DataParallelMeshDims(shard="ep")),
    ):
        with pytest.raises(MeshError):
            call()
    validate_mesh(mesh, DataParallelMeshDims(shard="dp"))


@pytest.mark.parametrize("asked", [True, False, 8, 4, 2])
@pytest.mark.parametrize("shape", [(8,), (2, 8)])
def test_after_forward(join_world, asked: bool | int, shape: tuple[int, ...]) -> None:
    join_world(3, 8 * len(shape))
    names = ("a", "b")[: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    info = mesh_info_of(mesh)
    ours = post_forward_mesh_info(asked, info)
    their_info = (
        oracle.FSDPMeshInfo(mesh, 0) if len(shape) == 1 else oracle.HSDPMeshInfo(mesh, 1, 0)
    )
    theirs = oracle_functions._get_post_forward_mesh_info(asked, their_info)
    assert (ours is None) == (theirs is None)
    if ours is not None and theirs is not None:
        assert type(ours).__name__ == type(theirs).__name__
        assert torch.equal(ours.mesh.mesh, theirs.mesh.mesh)
        assert ours.shard_mesh_size == theirs.shard_mesh_size == int(asked) or asked is True
        assert ours.shard_mesh_rank == theirs.shard_mesh_rank
    if asked is True or asked == 8:
        assert ours is info


def test_after_forward_by_default_and_on_one_rank(join_world) -> None:
    join_world(0, 4)
    info = mesh_info_of(init_device_mesh("cpu", (4,)))
    assert post_forward_mesh_info(None, info) is info
    assert post_forward_mesh_info(1, info) is None
    for wrong in (3, 8, 0, "all"):
        with pytest.raises(MeshError):
            post_forward_mesh_info(wrong, info)  # pyright: ignore[reportArgumentType]


def test_after_forward_in_a_world_of_one(join_world) -> None:
    join_world(0, 1)
    info = mesh_info_of(init_device_mesh("cpu", (1,)))
    assert post_forward_mesh_info(True, info) is info
    assert post_forward_mesh_info(1, info) is None


def test_after_forward_groups_neighbours_on_the_shard_axis(join_world) -> None:
    """Whichever axis of the mesh that is."""
    join_world(0, 8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "other"))
    after = post_forward_mesh_info(2, FSDPMeshInfo(mesh, 0))
    assert after is not None
    assert after.mesh.mesh.tolist() == [[0, 2], [4, 6], [1, 3], [5, 7]]


def test_after_forward_without_sharding(join_world) -> None:
    join_world(0, 16)
    mesh = cube()
    ddp = mesh_info_of(mesh, DataParallelMeshDims(replicate="dp"))
    assert post_forward_mesh_info(True, ddp) is None
    fsdp = mesh_info_of(mesh, DataParallelMeshDims(shard="tp"))
    assert post_forward_mesh_info(True, fsdp) is fsdp
    assert post_forward_mesh_info(fsdp.shard_mesh_size, fsdp) is fsdp


def test_after_forward_in_a_part_of_the_world(join_world) -> None:
    """Other ranks make groups of their own meanwhile, of which these hear nothing."""
    join_world(6, 16)
    fsdp = mesh_info_of(cube(), DataParallelMeshDims(shard="dp"))
    assert isinstance(fsdp, FSDPMeshInfo)
    ranks = dist.get_process_group_ranks(fsdp.shard_process_group)
    pods = mesh_info_of(cube(), DataParallelMeshDims(shard=("pod", "dp")))
    smaller = post_forward_mesh_info(2, pods)
    assert smaller is not None
    assert dist.get_process_group_ranks(smaller.shard_process_group) == ranks


def test_the_default_mesh_is_the_world(join_world) -> None:
    join_world(2, 4)
    mesh = default_mesh("cpu", mesh_dim_names=("dp",))
    assert mesh.mesh.tolist() == [0, 1, 2, 3]
    assert mesh.mesh_dim_names == ("dp",)
    assert mesh.get_group() is dist.group.WORLD
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    assert default_mesh().device_type == (accelerator.type if accelerator else "cpu")


def test_without_a_world_the_error_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not dist.is_initialized()
    with pytest.raises(MeshError, match="torchrun"):
        default_mesh("cpu")


def test_the_default_mesh_joins_a_world_of_one(
    join_world, monkeypatch: pytest.MonkeyPatch, unused_port: int
) -> None:
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_mesh("cpu").size() == 1
    assert dist.is_initialized()

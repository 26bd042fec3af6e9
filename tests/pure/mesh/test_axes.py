"""Checks on axes, which need no process group."""

from __future__ import annotations

import pytest
import torch.distributed.fsdp

import shoal.mesh
from shoal.errors import MeshError, MissingAxisError
from shoal.mesh.axes import (
    Axes,
    DataParallelMeshDims,
    _DataParallelMeshDims,
    reshard_size,
)

CUBE = Axes(sizes=(2, 3, 4), names=("a", "b", "c"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"sizes": (2, 0)},
        {"sizes": (2, 2), "names": ("a",)},
        {"sizes": (2, 2), "names": ("a", "a")},
    ],
)
def test_wrong_axes_cannot_be_built(arguments: dict) -> None:
    with pytest.raises(MeshError):
        Axes(**arguments)


def test_a_mesh_shards_or_also_replicates() -> None:
    Axes(sizes=(4,)).check_data_parallel(None)
    Axes(sizes=(2, 4), names=("replicate", "shard")).check_data_parallel(None)
    for wrong in (Axes(sizes=()), Axes(sizes=(2, 2, 2), names=("a", "b", "c"))):
        with pytest.raises(MeshError, match="one axis"):
            wrong.check_data_parallel(None)


def test_torch_answers_a_nameless_2d_mesh_with_an_assertion_so_we_do_too() -> None:
    with pytest.raises(AssertionError, match="2D mesh for HSDP with mesh_dim_names") as caught:
        Axes(sizes=(2, 2)).check_data_parallel(None)
    assert isinstance(caught.value, MissingAxisError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (DataParallelMeshDims(shard="d"), "not found in mesh"),
        (DataParallelMeshDims(shard="a", replicate="d"), "not found in mesh"),
        (DataParallelMeshDims(shard=("a", "a")), "named twice"),
        (DataParallelMeshDims(shard="a", replicate=("a", "b")), "named twice"),
        (DataParallelMeshDims(shard=("b", "a")), "mesh's order"),
        (DataParallelMeshDims(shard=()), "at least one axis"),
    ],
)
def test_named_axes_are_checked(dims: DataParallelMeshDims, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        CUBE.check_data_parallel(dims)


def test_names_need_a_mesh_that_has_them() -> None:
    with pytest.raises(MeshError, match="mesh_dim_names"):
        Axes(sizes=(2, 2)).check_data_parallel(DataParallelMeshDims(shard="a"))


def test_torchs_own_mesh_dims_are_used_where_it_has_them() -> None:
    theirs = getattr(torch.distributed.fsdp, "DataParallelMeshDims", _DataParallelMeshDims)
    assert DataParallelMeshDims is theirs


@pytest.mark.parametrize("cls", [DataParallelMeshDims, _DataParallelMeshDims])
def test_our_mesh_dims_are_torchs(cls: type) -> None:
    """Ours stands in where torch has none, so it must be alike."""
    dims = cls("a", replicate=("b", "c"))
    assert (dims.shard, dims.replicate) == ("a", ("b", "c"))
    assert (dims.shard_names, dims.replicate_names) == (("a",), ("b", "c"))
    assert cls(replicate="a").shard_names == ()
    assert cls(shard="a") == cls(shard="a")
    with pytest.raises(ValueError, match="shard"):
        cls()
    CUBE.check_data_parallel(dims)


@pytest.mark.parametrize(
    ("asked", "size"), [(None, 8), (True, 8), (False, 1), (8, 8), (4, 4), (2, 2)]
)
def test_reshard_size(asked: bool | int | None, size: int) -> None:
    assert reshard_size(asked, 8) == size


def test_one_rank_as_a_number_is_probably_a_mistake(caplog: pytest.LogCaptureFixture) -> None:
    assert reshard_size(1, 2) == 1
    assert "as False does" in caplog.text
    caplog.clear()
    assert reshard_size(1, 1) == 1
    assert not caplog.records


@pytest.mark.parametrize("asked", [0, -1, 3, 16, 2.0, "2"])
def test_other_reshard_sizes_are_refused(asked) -> None:
    with pytest.raises(ValueError, match="reshard_after_forward"):
        reshard_size(asked, 8)


def test_exported_names_are_sorted_and_there() -> None:
    names = shoal.mesh.__all__
    assert names == sorted(names)
    assert all(hasattr(shoal.mesh, name) for name in names)

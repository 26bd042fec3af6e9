"""Every test on a rank starts from the same state, whatever the one before it left."""

import gc
import os
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness import on_ranks, ranks

leftovers: list[weakref.ref[torch.Tensor]] = []


def disorder(folder: str) -> None:
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        draw()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
    os.environ["LEFT_BEHIND"] = "1"
    os.environ["RANK"] = "17"
    os.chdir(folder)


def state() -> dict[str, object]:
    return {
        "draws": (random.random(), np.random.rand(), torch.rand(1).item()),
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "filters": warnings.filters[:],
    }


def test_settings_do_not_leak(tmp_path):
    before, pids = on_ranks(2, state), on_ranks(2, os.getpid)
    on_ranks(2, disorder, str(tmp_path))
    assert on_ranks(2, state) == before
    assert on_ranks(2, os.getpid) == pids
    assert before[0]["draws"] == before[1]["draws"]
    assert before[0]["grad"] is True
    assert before[0]["threads"] == 1
    assert before[0]["environment"]["RANK"] == "0"
    assert before[1]["environment"]["LOCAL_RANK"] == "1"


def test_surroundings_of_the_test_reach_the_ranks(monkeypatch, tmp_path):
    monkeypatch.setenv("FROM_THE_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    for seen in on_ranks(2, state):
        assert seen["environment"]["FROM_THE_TEST"] == "yes"
        assert seen["folder"] == str(tmp_path)


@ranks(2)
def test_warnings_are_errors_as_in_pytest():
    with pytest.raises(UserWarning, match="mind"):
        warnings.warn("mind", stacklevel=1)


@pytest.mark.filterwarnings("ignore:mind")
@ranks(2)
def test_the_tests_own_filters_hold_on_ranks():
    warnings.warn("mind", stacklevel=1)


def leave_groups() -> int:
    dist.new_group([0])
    dist.new_group([0, 1])
    return os.getpid()


def leave_a_group_that_is_not_counted() -> int:
    dist.new_group([0, 1], use_local_synchronization=True)
    return os.getpid()


def use_up_a_name() -> int:
    group = dist.new_group([0, 1])
    dist.barrier()  # whoever leaves at once breaks the other's connection
    dist.destroy_process_group(group)
    return os.getpid()


def leave_no_default_group() -> int:
    dist.destroy_process_group()
    return os.getpid()


def swap_ranks() -> int:
    rank, store = dist.get_rank(), c10d._get_default_store()
    dist.destroy_process_group()
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=1 - rank, world_size=2)
    return os.getpid()


def look_around() -> tuple[int, int, int, int]:
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    return os.getpid(), dist.get_rank(), len(c10d._world.pg_map), c10d._world.group_count


@pytest.mark.parametrize(
    "disturb",
    [
        leave_groups,
        leave_a_group_that_is_not_counted,
        use_up_a_name,
        leave_no_default_group,
        swap_ranks,
    ],
)
def test_groups_are_renewed_without_new_processes(disturb):
    pids = on_ranks(2, disturb)
    assert on_ranks(2, look_around) == [(pid, rank, 1, 1) for rank, pid in enumerate(pids)]


def shard_on_a_mesh(shape: tuple[int, int], groups_before: int) -> list[float]:
    for _ in range(groups_before):
        dist.new_group()  # the mesh's groups get other names
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    full = torch.arange(8.0)
    shifted = distribute_tensor(full, mesh["inner"], [Shard(0)]) + 1
    assert isinstance(shifted, DTensor)
    return shifted.full_tensor().tolist()


def test_meshes_of_one_test_do_not_serve_the_next():
    expected = [number + 1.0 for number in range(8)]
    for shape, groups_before in [((2, 2), 2), ((2, 2), 0), ((1, 4), 0), ((2, 2), 1)]:
        assert on_ranks(4, shard_on_a_mesh, shape, groups_before) == [expected] * 4


def issue_on_one() -> int:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    return os.getpid()


def test_ranks_out_of_step_are_replaced():
    pids = on_ranks(2, issue_on_one)
    assert not set(pids) & {pid for pid, *_ in on_ranks(2, look_around)}


def leave_a_cycle() -> None:
    tensor = torch.zeros(1000)
    holder: list[object] = [tensor]
    holder.append(holder)
    leftovers.append(weakref.ref(tensor))


def survivors() -> list[bool]:
    return [reference() is not None for reference in leftovers]


def test_garbage_is_swept():
    gc.collect()
    on_ranks(2, leave_a_cycle)
    assert on_ranks(2, survivors) == [[False], [False]]

"""Ranks as threads: what is per rank, and what happens when ranks disagree."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shoal._torch import distributed_tensor
from shoal.comm.local import run_local
from shoal.errors import InvariantError, RankError, UsageError


def test_every_rank_returns_its_own_result() -> None:
    assert run_local(3, lambda power: dist.get_rank() ** power, 2) == [0, 1, 4]


def test_random_numbers_belong_to_a_rank() -> None:
    def body() -> tuple[float, ...]:
        torch.manual_seed(dist.get_rank())
        random.seed(dist.get_rank())
        np.random.seed(dist.get_rank())
        dist.barrier()  # the other ranks seed and draw meanwhile
        return torch.rand(()).item(), random.random(), np.random.rand()

    torch.manual_seed(7)
    before = torch.get_rng_state()
    drawn = run_local(3, body)
    assert torch.equal(torch.get_rng_state(), before), "the caller's generator must not move"
    for rank, numbers in enumerate(drawn):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        assert numbers == (torch.rand(()).item(), random.random(), np.random.rand())


def test_the_process_is_left_as_it_was() -> None:
    world, hook = dist.distributed_c10d._world, sys.excepthook
    run_local(2, dist.barrier)
    assert dist.distributed_c10d._world is world
    assert sys.excepthook is hook
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_meshes_have_their_own_groups() -> None:
    def body() -> tuple[list[int], float, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        sums = []
        for name in ("replicate", "shard"):
            total = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(total, group=mesh.get_group(name))
            sums.append(total.item())
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        return list(coordinate), sums[0], sums[1]

    assert run_local(4, body) == [
        ([0, 0], 2.0, 1.0),
        ([0, 1], 4.0, 1.0),
        ([1, 0], 2.0, 5.0),
        ([1, 1], 4.0, 5.0),
    ]


def test_a_group_can_be_made_anew() -> None:
    def body() -> float:
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.all_reduce(total)
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
        dist.init_process_group("shoal-local", rank=rank, world_size=size, store=store)
        dist.all_reduce(total)
        return total.item()

    assert run_local(2, body) == [8.0, 8.0]


def test_dtensors_redistribute() -> None:
    def body() -> tuple[Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        whole = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
        across = whole.redistribute(mesh, [Shard(1)])
        return across.to_local(), across.full_tensor()

    for rank, (local, full) in enumerate(run_local(4, body)):
        assert torch.equal(full, torch.arange(15.0).view(5, 3))
        assert torch.equal(local, full[:, rank : rank + 1])


def test_a_checkpoint_is_saved_and_loaded(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Linear(6, 5)
        fully_shard(model)
        return model

    def body() -> bool:
        torch.manual_seed(0)
        saved = make().state_dict()
        dcp.save(saved, checkpoint_id=tmp_path)
        torch.manual_seed(1)
        loaded = make().state_dict()
        dcp.load(loaded, checkpoint_id=tmp_path)
        return all(
            isinstance(tensor, DTensor)
            and torch.equal(
                distributed_tensor.local_tensor(loaded[name]),
                distributed_tensor.local_tensor(tensor),
            )
            for name, tensor in saved.items()
        )

    assert run_local(2, body) == [True, True]


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_coalesced_collectives_end_together(device: torch.device | None) -> None:
    def body() -> list[float]:
        tensors = [torch.full((2,), float(dist.get_rank() + index)) for index in range(3)]
        with dist._coalescing_manager(device=device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        return [tensor[0].item() for tensor in tensors]

    assert run_local(2, body) == [[1.0, 3.0, 5.0]] * 2


def test_batched_messages_may_cross() -> None:
    def body() -> list[float]:
        other = 1 - dist.get_rank()
        received = [torch.zeros(2), torch.zeros(2)]
        sent = [torch.full((2,), dist.get_rank() + 0.5 * index) for index in range(2)]
        operations = [dist.P2POp(dist.irecv, tensor, other) for tensor in received]
        operations += [dist.P2POp(dist.isend, tensor, other) for tensor in sent]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [tensor[0].item() for tensor in received]

    assert run_local(2, body) == [[1.0, 1.5], [0.0, 0.5]]


def test_waiting_for_a_key_lets_the_others_run() -> None:
    def body() -> bytes:
        store = dist.distributed_c10d._get_default_store()
        if dist.get_rank() == 0:
            return store.get("answer")
        store.add("count", 2)
        store.set("answer", "42")
        return str(store.add("count", 3)).encode()

    assert run_local(2, body) == [b"42", b"5"]


def test_collectives_are_hidden_from_autograd() -> None:
    def body() -> int:
        weight = torch.ones(3, requires_grad=True)
        buffer = torch.zeros(3)
        product = weight * buffer
        version = buffer._version
        dist.all_reduce(buffer)
        product.sum().backward()  # c10d does not bump versions, so this is as on gloo
        return buffer._version - version

    assert run_local(2, body) == [0, 0]


def test_backward_runs_in_the_thread_of_its_rank() -> None:
    class Threads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, *grads: Tensor) -> Tensor:
            names.append(threading.current_thread().name)
            dist.all_reduce(grads[0])
            return grads[0]

    names: list[str] = []

    def body() -> float:
        x = torch.ones(1, requires_grad=True)
        Threads.apply(x).backward()  # pyright: ignore
        assert x.grad is not None
        return x.grad.item()

    assert run_local(2, body) == [2.0, 2.0]
    assert sorted(names) == ["rank 0", "rank 1"]


def test_sums_are_in_rank_order_with_16_bit_floats_widened() -> None:
    def body() -> tuple[float, float]:
        # In fp32, 1 + 2^25 - 2^25 is 0 in this order; in bf16 256 + 1 + 1 stays 256.
        ordered = torch.tensor([[1.0], [2.0**25], [-(2.0**25)]][dist.get_rank()])
        narrow = torch.tensor([256.0, 1.0, 1.0][dist.get_rank()], dtype=torch.bfloat16)
        dist.all_reduce(ordered)
        dist.all_reduce(narrow)
        return ordered.item(), narrow.item()

    assert run_local(3, body) == [(0.0, 258.0)] * 3


def test_the_first_error_stops_everybody_and_names_its_rank() -> None:
    stopped: list[int] = []

    def body() -> None:
        try:
            if dist.get_rank() == 1:
                raise KeyError("boom")
            dist.barrier()
        except Exception:
            raise
        except BaseException:
            stopped.append(dist.get_rank())
            raise

    with pytest.raises(KeyError, match="boom") as error:
        run_local(3, body)
    assert error.value.__notes__ == ["raised on rank 1 of 3"]
    assert sorted(stopped) == [0]  # rank 2 had not begun, and was never let in
    assert run_local(2, dist.get_rank) == [0, 1]


def test_swallowing_errors_does_not_hide_that_another_rank_failed() -> None:
    def body() -> None:
        if dist.get_rank() == 1:
            raise KeyError("boom")
        for _ in range(3):
            with contextlib.suppress(Exception):
                dist.barrier()

    with pytest.raises(KeyError, match="boom"):
        run_local(2, body, timeout_s=10)


def test_a_rank_that_returns_early_is_named_at_once() -> None:
    def body() -> None:
        if dist.get_rank() != 1:
            dist.all_reduce(torch.zeros(4))

    start = time.perf_counter()
    with pytest.raises(RankError) as error:
        run_local(3, body, timeout_s=60)
    assert time.perf_counter() - start < 5, "a deadlock needs no timeout"
    message = str(error.value)
    assert "no rank can go on" in message
    assert (
        "rank 0 waits at all_reduce(4 of float32, SUM), collective 0 of group '0', for rank 1"
        in (message)
    )
    assert "rank 1 has ended" in message


def test_ranks_that_wait_in_different_groups_are_named() -> None:
    def body() -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        for group in (first, second) if dist.get_rank() == 0 else (second, first):
            dist.barrier(group=group)

    with pytest.raises(RankError, match="no rank can go on") as error:
        run_local(2, body)
    assert "rank 0 waits at barrier(), collective 0 of group '1', for rank 1" in str(error.value)
    assert "rank 1 waits at barrier(), collective 0 of group '2', for rank 0" in str(error.value)


def test_a_stuck_rank_is_shown_with_all_stacks() -> None:
    release = threading.Event()

    def stuck_here() -> None:
        release.wait(30)

    def body() -> None:
        if dist.get_rank() == 1:
            stuck_here()
        dist.barrier()

    try:
        with pytest.raises(RankError) as error:
            run_local(2, body, timeout_s=0.5)
    finally:
        release.set()
    message = str(error.value)
    assert "did not finish within 0.5 s" in message
    assert "rank 0 waits at barrier(), collective 0 of group '0', for rank 1" in message
    assert "rank 1 is running" in message
    assert "stack of rank 0:" in message
    assert "stack of rank 1:" in message
    assert "stuck_here" in message


def test_a_stuck_rank_never_meets_the_groups_of_its_process() -> None:
    release, came_back = threading.Event(), threading.Event()

    def body() -> None:
        release.wait(30)
        try:
            dist.barrier()
        finally:
            came_back.set()

    with pytest.raises(RankError, match="did not finish"):
        run_local(1, body, timeout_s=0.1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        release.set()
        assert came_back.wait(10)
        time.sleep(0.1)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            lambda: dist.all_reduce(torch.zeros(2)),
            lambda: dist.all_reduce(torch.zeros(3)),
            r"called all_reduce\(2 of float32, SUM\), rank 1 all_reduce\(3 of float32, SUM\)",
        ),
        (
            lambda: dist.all_reduce(torch.zeros(2)),
            lambda: dist.all_reduce(torch.zeros(2, dtype=torch.int32)),
            r"all_reduce\(2 of float32, SUM\), rank 1 all_reduce\(2 of int32, SUM\)",
        ),
        (
            lambda: dist.all_reduce(torch.zeros(2)),
            lambda: dist.all_reduce(torch.zeros(2), op=dist.ReduceOp.MAX),
            r"all_reduce\(2 of float32, SUM\), rank 1 all_reduce\(2 of float32, MAX\)",
        ),
        (
            lambda: dist.all_reduce(torch.zeros(2)),
            dist.barrier,
            r"all_reduce\(2 of float32, SUM\), rank 1 barrier\(\)",
        ),
        (
            lambda: dist.broadcast(torch.zeros(2), 0),
            lambda: dist.broadcast(torch.zeros(2), 1),
            r"broadcast\(2 of float32, root 0\), rank 1 broadcast\(2 of float32, root 1\)",
        ),
    ],
)
def test_different_collectives_are_named(first, second, message: str) -> None:
    with pytest.raises(InvariantError, match=message) as error:
        run_local(2, lambda: (first, second)[dist.get_rank()]())
    assert "collective 0 of group '0' differs between ranks" in str(error.value)


def test_pieces_that_do_not_fit_are_named() -> None:
    def body() -> None:
        dist.all_to_all_single(torch.zeros(3), torch.zeros(2), [1, 2], [1, 1])

    with pytest.raises(UsageError, match=r"rank 1 sends 1 of torch.float32 to rank 0, which expec"):
        run_local(2, body)


def test_a_message_of_another_size_is_named() -> None:
    def body() -> None:
        if dist.get_rank() == 0:
            dist.send(torch.zeros(2), 1)
        else:
            dist.recv(torch.zeros(3), 0)

    with pytest.raises(UsageError, match=r"rank 0 sent 2 of torch.float32, rank 1 expected 3"):
        run_local(2, body)


def test_only_the_thread_of_a_rank_may_communicate() -> None:
    caught: list[BaseException] = []

    def body() -> None:
        group = dist.group.WORLD

        def from_elsewhere() -> None:
            try:
                assert group is not None
                group.barrier()
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=from_elsewhere, name="a helper")
        thread.start()
        thread.join()

    run_local(1, body)
    assert isinstance(caught[0], InvariantError)
    assert "thread 'a helper' used a process group of rank 0" in str(caught[0])


def test_what_is_not_served_says_so() -> None:
    with pytest.raises(NotImplementedError, match="does not receive from any source"):
        run_local(2, lambda: dist.recv(torch.zeros(1)))


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_needs_ranks(size: int) -> None:
    with pytest.raises(UsageError, match="world_size must be at least 1"):
        run_local(size, dist.get_rank)


def test_runs_do_not_nest() -> None:
    with pytest.raises(UsageError, match="cannot run twice"):
        run_local(2, lambda: run_local(2, dist.get_rank))

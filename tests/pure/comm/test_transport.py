"""Transport and Pending: what they refuse, and that any c10d group will do."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.comm import Pending, Prepared, Transport, observer
from shoal.comm.local import run_local
from shoal.comm.modelled import FREE, Network, init_modelled
from shoal.comm.pending import Started, launch
from shoal.errors import MeshError, RankError, UsageError


class FlakyWork:
    """Fails the first `num_failures` times it is waited for."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_waits = 0
        self._num_failures = num_failures

    def wait(self) -> bool:
        self.num_waits += 1
        if self.num_waits <= self._num_failures:
            raise RuntimeError("connection reset")
        return True


class Listener:
    """Stands for a watchdog: notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def launching(self, reason: str, group: object, tensor: Tensor | None) -> str:
        self.heard.append(f"launching {reason}")
        return reason

    def in_stream(self, launched: str | None = None) -> None:
        self.heard.append(f"in stream: {launched or 'the last'}")

    def waiting(self, reason: str) -> None:
        self.heard.append(f"waiting for {reason}")

    def arrived(self) -> None:
        self.heard.append("arrived")

    def explained(self, failure: str) -> str:
        return failure


def world() -> Transport:
    group = dist.group.WORLD
    assert group is not None
    return Transport(group)


def test_waiting_happens_once() -> None:
    work, output, finished = FlakyWork(), torch.zeros(2), []
    pending = Pending(output, work, "gather of layer 3", lambda: finished.append(1))
    assert not pending.waited
    assert "gather of layer 3" in repr(pending)
    assert "in flight" in repr(pending)
    assert pending.wait() is output
    assert pending.wait() is output
    assert pending.waited
    assert (work.num_waits, finished) == (1, [1])


def test_a_failed_wait_names_the_reason_and_may_be_repeated() -> None:
    pending = Pending(torch.zeros(2), FlakyWork(num_failures=1), "gather of layer 3")
    with pytest.raises(RankError, match=r"gather of layer 3 failed .* connection reset"):
        pending.wait()
    assert not pending.waited
    pending.wait()


def test_what_is_left_to_do_is_done_without_a_work_too() -> None:
    finished: list[int] = []
    pending = Pending(torch.zeros(2), None, "copy of layer 3", lambda: finished.append(1))
    assert not pending.waited
    pending.wait()
    pending.wait()
    assert pending.waited
    assert finished == [1]


def test_a_failed_launch_names_the_reason() -> None:
    def start() -> Started:
        raise RuntimeError("connection refused")

    with pytest.raises(RankError, match=r"gather of layer 3 could not be started: connection"):
        Prepared(torch.zeros(2), "gather of layer 3", start).launch()


def test_a_prepared_collective_reads_its_tensors_at_each_launch() -> None:
    def body() -> list[list[float]]:
        transport = world()
        shard, gathered, reduced = torch.zeros(1), torch.zeros(2), torch.zeros(1)
        pairs = [(gathered, shard)]
        gather = transport.prepare_all_gathers(gathered, pairs, reason="gather of layer 3")
        total = transport.prepare_all_reduce(shard)
        assert "gather of layer 3" in repr(gather)
        found = []
        for step in range(2):
            shard.fill_(10 * step + transport.rank)
            assert gather.launch().wait() is gathered
            transport.reduce_scatter(reduced, gathered, ReduceOp.AVG).wait()
            total.launch().wait()
            found.append([*gathered.tolist(), reduced.item(), shard.item()])
        return found

    assert run_local(2, body) == [[[0, 1, rank, 1], [10, 11, 10 + rank, 21]] for rank in range(2)]


def test_collectives_on_thread_ranks() -> None:
    def body() -> list[Tensor]:
        transport = world()
        shard = torch.full((2,), float(transport.rank))
        gathered, reduced = torch.empty(2 * transport.size), torch.empty(2)
        transport.all_gather(gathered, shard).wait()
        transport.reduce_scatter(reduced, gathered * (transport.rank + 1), ReduceOp.AVG).wait()
        total = transport.all_reduce(shard.clone(), ReduceOp.MAX).wait()
        sent = transport.broadcast(shard.clone(), 2).wait()
        received = torch.empty(6)
        transport.all_to_all(
            received, torch.full((6,), float(transport.rank)), [2, 2, 2], [2, 2, 2]
        ).wait()
        return [gathered, reduced, total, sent, received]

    for rank, (gathered, reduced, total, sent, received) in enumerate(run_local(3, body)):
        everyone = torch.tensor([0.0, 0, 1, 1, 2, 2])
        assert torch.equal(gathered, everyone)
        assert torch.equal(reduced, torch.full((2,), 2.0 * rank))
        assert torch.equal(total, torch.full((2,), 2.0))
        assert torch.equal(sent, torch.full((2,), 2.0))
        assert torch.equal(received, everyone)


def test_an_output_is_not_there_before_the_wait() -> None:
    def body() -> tuple[float, float]:
        transport = world()
        output = torch.zeros(2)
        pending = transport.all_gather(output, torch.ones(1))
        early = output.sum().item()
        pending.wait()
        return early, output.sum().item()

    # The last rank to come finds everybody there; the first one has to wait.
    assert run_local(2, body) == [(0.0, 2.0), (2.0, 2.0)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: t.all_gather(torch.empty(3), torch.empty(2)),
            "output has 3 elements, expected 4",
        ),
        (
            lambda t: t.reduce_scatter(torch.empty(2), torch.empty(3)),
            "input has 3 elements, expected 4",
        ),
        (
            lambda t: t.all_gather(torch.empty(2, 2), torch.empty(2)),
            r"output must be one-dimensional and contiguous, got shape \(2, 2\)",
        ),
        (
            lambda t: t.all_gather(torch.empty(4), torch.empty(4)[::2]),
            "input must be one-dimensional and contiguous",
        ),
        (
            lambda t: t.all_gather(torch.empty(4), torch.empty(2, dtype=torch.int32)),
            "must share dtype and device",
        ),
        (
            lambda t: t.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.AVG),
            "AVG of torch.int32 is not whole; reduce with SUM",
        ),
        (lambda t: t.broadcast(torch.empty(2), 2), r"source must be a rank in \[0, 2\), got 2"),
        (
            lambda t: t.all_to_all(torch.empty(3), torch.empty(4)),
            "output of 3 elements cannot be cut into 2 equal pieces; pass output_numels",
        ),
        (
            lambda t: t.all_to_all(torch.empty(3), torch.empty(4), [1, 1], [2, 2]),
            "output has 3 elements, expected 2",
        ),
        (
            lambda t: t.all_to_all(torch.empty(3), torch.empty(4), [3], [2, 2]),
            r"output_numels must give a size for each of 2 ranks, got \[3\]",
        ),
    ],
)
def test_wrong_tensors_are_refused_before_anything_is_sent(call, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run_local(2, lambda: call(world()))


def test_reducing_what_nobody_reduces_is_not_implemented() -> None:
    def body() -> None:
        world().all_reduce(torch.zeros(2, dtype=torch.float8_e4m3fn))

    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        run_local(2, body)


def test_a_rank_outside_the_group_has_no_transport() -> None:
    def body() -> None:
        Transport(dist.new_group([0]))  # pyright: ignore[reportArgumentType]

    with pytest.raises(MeshError, match="expected a process group that this rank belongs to"):
        run_local(2, body)


class OnCuda:
    """Stands for a CUDA tensor."""

    is_cuda = True


def test_a_wait_on_cuda_tells_which_collective_the_stream_has_come_to() -> None:
    """Several are in flight, and are waited for in another order."""
    listener = Listener()
    with observer.observing(listener):
        launched = [
            launch(name, cast(Any, "group"), cast(Tensor, OnCuda()), lambda: (FlakyWork(), None))
            for name in "ab"
        ]
        listener.heard.clear()
        for pending in reversed(launched):
            pending.wait()
    assert listener.heard == [
        *("waiting for b", "arrived", "in stream: b"),
        *("waiting for a", "arrived", "in stream: a"),
    ]


def test_a_wait_on_the_host_is_in_no_stream() -> None:
    listener = Listener()
    with observer.observing(listener):
        launch("a", cast(Any, "group"), torch.zeros(1), lambda: (FlakyWork(), None)).wait()
    assert listener.heard == ["launching a", "waiting for a", "arrived"]


@pytest.mark.parametrize("network", [FREE, Network("fast", 1000.0, 1.0)], ids=lambda n: n.name)
def test_collectives_of_a_lane_are_heard_of(network: Network) -> None:
    """On CUDA they run on the caller's stream; what is told does not depend on the device."""
    listener, shard = Listener(), torch.ones(2)
    group = init_modelled(4, network, "cpu")
    try:
        transport = Transport(group)
        output = torch.zeros(8)
        gather = transport.gather_in_stream(output, [(output, shard)], reason="the gather")
        reduce = transport.reduce_scatter_in_stream(ReduceOp.AVG, reason="the reduction")
        gather()
        with observer.observing(listener):
            gather()
            reduced = torch.zeros(2)
            reduce(reduced, [(reduced, torch.ones(8))])
    finally:
        dist.destroy_process_group()
    assert listener.heard == [
        *("launching the gather", "in stream: the last"),
        *("launching the reduction", "in stream: the last"),
    ]


def test_a_gather_whose_memory_is_kept_is_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes nothing, and other ranks would wait for it all the same."""

    class Kept:
        def holds(self, flat: Tensor) -> bool:
            return True

    listener, output = Listener(), torch.zeros(8)
    group = init_modelled(4, FREE, "cpu")
    try:
        pairs = [(output, torch.ones(2))]
        gather = Transport(group).gather_in_stream(output, pairs, reason="the gather")
        monkeypatch.setattr(group.job, "kept", Kept())
        with observer.observing(listener):
            gather()
    finally:
        dist.destroy_process_group()
    assert not output.any()
    assert listener.heard == ["launching the gather", "in stream: the last"]

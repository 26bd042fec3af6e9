"""Messages between some pairs of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from harness import ranks
from shoal.comm.local import run_local
from shoal.comm.messages import backend_of, carrier_device, send_messages
from shoal.errors import UsageError

CPU = torch.device("cpu")


def world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def exchange(dtype: torch.dtype) -> None:
    """Rank 0 and 1 swap, rank 2 hears from 0, rank 3 stays alone."""
    group = world()
    pairs = [(0, 1), (1, 0), (0, 2)]
    content = {pair: torch.arange(3 + number).to(dtype) for number, pair in enumerate(pairs)}
    received = {pair: torch.empty_like(message) for pair, message in content.items()}
    rank = group.rank()
    started = send_messages(
        group,
        [(to, content[at, to]) for at, to in pairs if at == rank],
        [(at, received[at, to]) for at, to in pairs if to == rank],
        device=CPU,
    )
    for pending in started:
        pending.wait()
    for at, to in pairs:
        if to == rank:
            assert torch.equal(received[at, to], content[at, to])


@ranks(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.complex64, torch.bool])
def test_only_those_talk_that_have_something_to_say(dtype: torch.dtype) -> None:
    exchange(dtype)


def test_other_backends_carry_an_all_to_all() -> None:
    run_local(4, exchange, torch.float32)


@ranks(2)
def test_a_users_messages_are_not_mixed_up() -> None:
    """One with the default tag is on its way, and is not taken for ours."""
    group, own = world(), torch.zeros(2)
    sent = None
    if group.rank() == 0:
        sent = dist.isend(torch.full((2,), 7.0), 1)
        started = send_messages(group, [(1, torch.full((2,), 5.0))], [], device=CPU)
    else:
        started = send_messages(group, [], [(0, own)], device=CPU)
    for pending in started:
        pending.wait()
    if sent is None:
        assert own.tolist() == [5.0, 5.0]
        dist.recv(own, 0)
        assert own.tolist() == [7.0, 7.0]
    else:
        sent.wait()


@ranks(2)
def test_sends_are_made_while_others_travel() -> None:
    """Receives are ready before the first send is asked for."""
    group = world()
    other = 1 - group.rank()
    received, order = torch.zeros(1), []

    def sends() -> Iterator[tuple[int, torch.Tensor]]:
        order.append("asked")
        yield other, torch.ones(1)

    for pending in send_messages(group, sends(), [(other, received)], device=CPU, reason="a swap"):
        assert order == ["asked"]
        pending.wait()
    assert received.item() == 1


@ranks(2)
def test_messages_lie_in_one_run() -> None:
    group = world()
    with pytest.raises(UsageError, match="one-dimensional and contiguous"):
        send_messages(group, [(1 - group.rank(), torch.zeros(2, 2))], [], device=CPU)


@ranks(2)
def test_gloo_carries_host_memory() -> None:
    group = world()
    assert backend_of(group, CPU) == "gloo"
    assert carrier_device(group, CPU) == CPU
    assert carrier_device(group, torch.device("cuda", 0)) == CPU

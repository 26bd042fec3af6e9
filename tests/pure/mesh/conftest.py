"""A world of which this process is one rank, and the other ranks are imaginary."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

JoinWorld = Callable[[int, int], None]


@pytest.fixture
def join_world() -> Iterator[JoinWorld]:
    def join(rank: int, world_size: int) -> None:
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]

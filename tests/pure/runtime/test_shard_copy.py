"""Copies from the host: who waits for whom, on lanes that only write down what they are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from shoal.runtime.gather import ShardCopy
from shoal.runtime.streams import CudaLane


class NotingLane(CudaLane):
    """Does at once what it is given, and notes the order."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.num_marks = name, log, 0
        self.free: list[Any] = []

    def __enter__(self) -> NotingLane:
        self.log.append(f"{self.name} waits for compute")
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append(f"{self.name} is left")

    def mark(self) -> Any:
        self.num_marks += 1
        return f"mark {self.num_marks} of {self.name}"

    def follow(self, other: CudaLane, mark: Any) -> None:
        assert isinstance(other, NotingLane)
        self.log.append(f"{self.name} waits for {mark}")
        other.free.append(mark)

    def join(self, mark: Any) -> None:
        self.log.append(f"compute waits for {mark}")
        self.free.append(mark)


def copied(log: list[str]) -> tuple[ShardCopy, NotingLane, NotingLane]:
    copying, gathering = NotingLane("copying", log), NotingLane("gathering", log)
    stored: Any = SimpleNamespace(buffer=torch.arange(6, dtype=torch.uint8), packing="packing")
    streams: Any = SimpleNamespace(device=torch.device("cpu"), copying=copying)
    return ShardCopy(stored, streams), copying, gathering


def test_a_gather_comes_after_the_copy_and_compute_after_the_gather() -> None:
    log: list[str] = []
    copy, copying, gathering = copied(log)
    assert torch.equal(copy.buffer, torch.arange(6, dtype=torch.uint8))
    copy.precede(gathering)
    assert log == [
        *("copying waits for compute", "copying is left"),
        "gathering waits for mark 1 of copying",
    ]
    assert copying.free == ["mark 1 of copying"], "it can be used again, and is given back once"
    copy.discard()  # the gather raised: compute comes after whatever it has read
    assert log[-1] == "compute waits for mark 1 of gathering"
    assert copying.free == ["mark 1 of copying"]


def test_memory_of_a_copy_that_nobody_read_waits_for_the_copy() -> None:
    log: list[str] = []
    copy, copying, _ = copied(log)
    copy.discard()
    assert log[-1] == "compute waits for mark 1 of copying"
    assert copying.free == ["mark 1 of copying"]


def test_without_lanes_it_is_a_copy() -> None:
    stored: Any = SimpleNamespace(buffer=torch.arange(6, dtype=torch.uint8), packing="packing")
    streams: Any = SimpleNamespace(device=torch.device("cpu"), copying=None)
    copy = ShardCopy(stored, streams)
    stored.buffer.zero_()
    assert torch.equal(copy.buffer, torch.arange(6, dtype=torch.uint8))
    copy.discard()

"""Slots of gathered parameters: taken in turns, and on CPU given back where they are large."""

from __future__ import annotations

import pytest
import torch

from shoal.runtime import arena as arenas
from shoal.runtime.arena import Arena, Buffer

pytestmark = pytest.mark.skipif(
    not Arena(torch.device("cpu")).swaps, reason="this torch resizes storages: there are no slots"
)


def _filled(arena: Arena, *sizes: int) -> list[Buffer]:
    buffers = [Buffer(size, arena) for size in sizes]
    for buffer in buffers:
        buffer.settle()
        buffer.fill()
    return buffers


def test_units_of_one_size_take_turns_in_one_slot() -> None:
    arena = Arena(torch.device("cpu"))
    (first,) = _filled(arena, 4096)
    at = first.bytes.data_ptr()
    first.empty()
    (second,) = _filled(arena, 4096)
    assert second.bytes.data_ptr() == at


def test_large_slots_on_cpu_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_KEPT_BYTES", 10_000)
    arena = Arena(torch.device("cpu"))
    for buffer in _filled(arena, 10_001):
        buffer.empty()
    assert arena.num_bytes == 0


def test_slots_on_cpu_are_kept_up_to_a_bound_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the slots of every size that a model has add up, and none is in use at the peak."""
    monkeypatch.setattr(arenas, "_KEPT_BYTES", 10_000)
    arena = Arena(torch.device("cpu"))
    for buffer in _filled(arena, 4000, 4000, 6000, 3000):
        buffer.empty()
        assert arena.num_bytes <= 10_000
    assert arena.num_bytes == 9000, "the slots in use last are kept"

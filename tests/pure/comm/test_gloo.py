"""Scratch: memory comes back, within a limit."""

from __future__ import annotations

import torch

from shoal.comm.gloo import Scratch


def test_a_buffer_comes_back_to_whoever_asks_for_its_size_and_dtype() -> None:
    scratch = Scratch()
    first = scratch.take(torch.zeros(4))
    second = scratch.take(torch.zeros(4))
    assert first.data_ptr() != second.data_ptr(), "both are in use"
    scratch.give_back(first)
    assert scratch.num_bytes == 16
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.int32)):
        taken = scratch.take(other)
        assert (taken.shape, taken.dtype) == (other.shape, other.dtype)
    assert scratch.take(torch.ones(4)) is first
    assert scratch.num_bytes == 0


def test_no_more_is_kept_than_allowed() -> None:
    scratch = Scratch(max_bytes=40)
    scratch.give_back(torch.zeros(11))
    assert scratch.num_bytes == 0, "too large to keep"
    scratch.give_back(torch.zeros(6))
    scratch.give_back(torch.zeros(2))
    assert scratch.num_bytes == 32
    scratch.give_back(torch.zeros(3))
    assert scratch.num_bytes == 12, "what was there makes room"


def test_memory_taken_in_inference_mode_serves_outside() -> None:
    scratch = Scratch()
    with torch.inference_mode():
        buffer = scratch.take(torch.zeros(4))
    assert not buffer.is_inference()
    buffer.zero_()


def test_only_the_hosts_memory_is_kept() -> None:
    scratch = Scratch()
    scratch.give_back(scratch.take(torch.zeros(4, device="meta")))
    assert scratch.num_bytes == 0

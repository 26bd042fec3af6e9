"""Calls and slots: where the pieces are, and what is refused."""

from __future__ import annotations

import pytest
import torch

from shoal.comm.calls import Slots, move
from shoal.errors import UsageError


def test_equal_slots_are_views_of_one_tensor() -> None:
    tensor = torch.arange(6.0).view(3, 2)
    slots = Slots.like(torch.zeros(2), tensor, 3)
    slots[1].fill_(9)
    assert tensor.tolist() == [[0, 1], [9, 9], [4, 5]]
    assert (slots.num_bytes, slots.is_even) == (24, True)


def test_uneven_slots_are_rows() -> None:
    tensor = torch.arange(8.0).view(4, 2)
    slots = Slots.uneven(tensor, [1, 0, 3], 3)
    assert [slots[rank].tolist() for rank in range(3)] == [[0, 1], [], [2, 3, 4, 5, 6, 7]]
    assert not slots.is_even
    assert Slots.uneven(tensor, [], 2)[1].tolist() == [4, 5, 6, 7]


def test_listed_slots_are_the_tensors() -> None:
    pieces = [torch.zeros(2), torch.ones(3)]
    slots = Slots.listed(pieces, 2)
    assert slots[1].tolist() == [1, 1, 1]
    assert slots.num_bytes == 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Slots.equal(torch.zeros(5), 2), "5 elements has no 2 equal pieces"),
        (lambda: Slots.listed([torch.zeros(1)], 2), "one tensor for each of 2 ranks, got 1"),
        (lambda: Slots.uneven(torch.zeros(4), [1, 2], 2), r"add up to 4 rows, got \[1, 2\]"),
        (lambda: Slots.uneven(torch.zeros(4), [4], 2), r"must be 2 numbers"),
        (
            lambda: Slots.like(torch.zeros(2), torch.zeros(8), 2),
            r"8 elements of torch.float32 are not 2 × 2",
        ),
        (
            lambda: Slots.like(torch.zeros(2).int(), torch.zeros(4), 2),
            r"of torch.float32 are not 2 × 2 of torch.int32",
        ),
        (lambda: move(torch.zeros(2), torch.zeros(3)), "of 2 elements cannot receive 3 elements"),
    ],
)
def test_what_does_not_fit_is_refused(make, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()

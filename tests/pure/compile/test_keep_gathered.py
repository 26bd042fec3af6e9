"""Which units stay gathered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.compile.keep_gathered import choose_kept, keep_gathered
from shoal.errors import UsageError


def test_the_last_ones_stay() -> None:
    assert choose_kept([3, 3, 3, 3], 7) == [2, 3]
    assert choose_kept([1, 9, 3], 5) == [0, 2]
    assert choose_kept([5], 4) == []


@given(sizes=st.lists(st.integers(0, 50)), budget=st.integers(0, 500))
def test_the_budget_holds_and_nothing_more_would_fit(sizes: list[int], budget: int) -> None:
    kept = choose_kept(sizes, budget)
    left = budget - sum(sizes[place] for place in kept)
    assert left >= 0
    assert all(size > left for place, size in enumerate(sizes) if place not in kept)


def test_what_cannot_be_decided_is_refused() -> None:
    with pytest.raises(UsageError, match="fully_shard"):
        keep_gathered(nn.Linear(2, 2), 1)
    with pytest.raises(UsageError, match="budget"):
        choose_kept([1], -1)

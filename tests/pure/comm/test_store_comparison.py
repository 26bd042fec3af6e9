"""Ranks that compare what they are about to do: a few bytes each, however many there are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Lock
from typing import Any

import pytest
import torch.distributed as dist

from shoal.comm.store_comparison import StoreComparison
from shoal.errors import RankError

Described = list[dict[str, object]]


class Counted:
    """A store that counts what is written and read, all participants together."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self._lock = Lock()
        self.num_bytes = self.num_calls = 0

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_calls += 1
            self.num_bytes += num_bytes

    def add(self, key: str, amount: int) -> int:
        self._count(8)
        return self._store.add(key, amount)

    def set(self, key: str, value: str) -> None:
        self._count(len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self._count(len(value))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._store.multi_get(keys)
        self._count(sum(map(len, values)))
        return values

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._count(0)
        self._store.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)


def meet(num: int, described: Callable[[int], Described], *, absent: int = -1) -> Any:
    """Let participants compare, each in a thread; what each was told, and the store."""
    store: Any = Counted()
    ranks = tuple(range(num))
    timeout = timedelta(seconds=30 if absent < 0 else 0.3)

    def take_part(rank: int) -> str:
        if rank == absent:
            return ""
        return StoreComparison(store, ranks, rank, "Advice.", timeout).verdict(
            described(rank), "{} and {}"
        )

    with ThreadPoolExecutor(num) as pool:
        return [pool.submit(take_part, rank) for rank in ranks], store


def units(num: int, odd: int = -1) -> Described:
    return [
        {"unit": f"blocks.{i}", "layout": "Even()", "parameters": {"w": f"[{i == odd}, 4096]"}}
        for i in range(num)
    ]


@pytest.mark.parametrize("num_units", [1, 200])
def test_a_thousand_ranks_that_agree_exchange_digests_alone(num_units: int) -> None:
    told, store = meet(1024, lambda _: units(num_units))
    assert {one.result() for one in told} == {""}
    assert store.num_bytes < 1024 * 160
    assert store.num_calls <= 1024 * 4 + 3  # the first reads all of them by one call


def test_one_of_many_that_differs_is_named_to_all() -> None:
    told, store = meet(256, lambda rank: units(100, 42 if rank == 77 else -1))
    assert {one.result() for one in told} == {
        "rank 0 and rank 77: parameter 'w' of unit 'blocks.42' is [False, 4096] and [True, 4096]"
    }
    text = 100 * 80
    assert store.num_bytes < 256 * 400 + 2 * text  # one text, and nobody else's


def test_one_that_stays_away_is_named() -> None:
    told, _ = meet(4, lambda _: units(1), absent=2)
    with pytest.raises(RankError, match=r"rank 0 is at unit 'blocks\.0', and rank 2 did not come"):
        told[0].result()
    with pytest.raises(RankError, match="rank 0 did not come there"):
        told[1].result()


def test_one_that_failed_tells_the_others() -> None:
    store: Any = Counted()
    meetings = [StoreComparison(store, (0, 1), rank, "Advice.") for rank in (0, 1)]
    meetings[1].fail("rank 1 raised")
    assert meetings[0].verdict(units(1), "{} and {}") == "rank 1 raised"

"""Ranks compare descriptions through the store of their job, in a few bytes each if they agree.

each rank     leaves a digest of its description, and waits for the verdict
the first     reads all digests; equal: nothing more is said
              else asks one rank that differs for its text, and publishes the first difference

No collective is involved: one that only some ranks enter would hang in just the case that this is
for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from shoal.errors import RankError

TIMEOUT = timedelta(minutes=5)
_FAILED, _ASKED = "failed: ", "asked: "
"""How a rank begins that raised, and so has nothing to compare; and a verdict that needs a text."""


class StoreComparison:
    """One comparison, as one of its ranks takes part in it."""

    def __init__(
        self,
        store: dist.Store,
        ranks: tuple[int, ...],
        rank: int,
        advice: str,
        timeout: timedelta = TIMEOUT,
    ) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self._advice, self._timeout = advice, timeout
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
        # The store counts, not the process: ranks may be threads, and a new job has a new store.
        number = store.add(f"shoal/agree/{digest}/count/{rank}", 1)
        self._key = f"shoal/agree/{digest}/{number}"

    def fail(self, failure: str) -> None:
        """Tell the others why this rank has nothing to compare. Waits for nobody."""
        self._store.set(f"{self._key}/{self._rank}", f"{_FAILED}{failure}")
        if self._rank == self._ranks[0]:
            self._store.set(f"{self._key}/verdict", failure)

    def verdict(self, mine: list[dict[str, object]], accusation: str) -> str:
        """In what ranks differ, if they do; the same on all of them."""
        text = json.dumps(mine)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self._store.set(f"{self._key}/{self._rank}", digest)
        if self._rank == self._ranks[0]:
            self._judge(mine, digest, accusation)
        verdict = self._read("verdict", mine, self._ranks[0])
        if verdict.startswith(_ASKED):
            if int(verdict.removeprefix(_ASKED)) == self._rank:
                self._store.set(f"{self._key}/text", text)
            verdict = self._read("difference", mine, self._ranks[0])
        return verdict

    def _judge(self, mine: list[dict[str, object]], digest: str, accusation: str) -> None:
        others = self._ranks[1:]
        keys = [f"{self._key}/{other}" for other in others]
        try:
            self._store.wait(keys, self._timeout)
        except dist.DistStoreError as error:
            missing = [other for other, key in zip(others, keys, strict=True) if not self._has(key)]
            raise self._absence(mine, missing or others) from error
        said = [value.decode() for value in self._store.multi_get(keys)]
        failures = [one.removeprefix(_FAILED) for one in said if one.startswith(_FAILED)]
        differing = [other for other, one in zip(others, said, strict=True) if one != digest]
        if failures or not differing:
            self._store.set(f"{self._key}/verdict", failures[0] if failures else "")
            return
        other = differing[0]
        self._store.set(f"{self._key}/verdict", f"{_ASKED}{other}")
        difference = _difference(mine, json.loads(self._read("text", mine, other)))
        accused = accusation.format(f"rank {self._rank}", f"rank {other}")
        self._store.set(f"{self._key}/difference", f"{accused}: {difference}")

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    def _read(self, what: str, mine: list[dict[str, object]], other: int) -> str:
        """What another rank says, which may have gone elsewhere."""
        key = f"{self._key}/{what}"
        try:
            self._store.wait([key], self._timeout)
        except dist.DistStoreError as error:
            raise self._absence(mine, (other,)) from error
        return self._store.get(key).decode()

    def _absence(self, mine: list[dict[str, object]], others: Sequence[int]) -> RankError:
        return RankError(
            f"rank {self._rank} is at {_place(mine)}, and rank {others[0]} did not come there "
            f"within {self._timeout}. {self._advice}"
        )


def _difference(mine: list[dict[str, object]], theirs: list[dict[str, object]]) -> str | None:
    """The first thing in which two ranks differ."""
    for a, b in zip(mine, theirs, strict=False):
        for what in a:
            if what != "parameters" and a[what] != b.get(what):
                return f"{what} {a[what]} and {b.get(what)}"
        ours, others = a["parameters"], b["parameters"]
        assert isinstance(ours, dict)
        assert isinstance(others, dict)
        for name in dict.fromkeys((*ours, *others)):
            if ours.get(name) != others.get(name):
                return (
                    f"parameter {name!r} of unit {a['unit']!r} is {ours.get(name, 'missing')} and "
                    f"{others.get(name, 'missing')}"
                )
    if len(mine) != len(theirs):
        extra = (mine if len(mine) > len(theirs) else theirs)[min(len(mine), len(theirs))]
        return f"there are {len(mine)} and {len(theirs)}, the first too many is {_place([extra])}"
    return None


def _place(described: list[dict[str, object]]) -> str:
    """Where a rank is, by the first thing that it names."""
    what, name = next(iter(described[0].items())) if described else ("nothing", "")
    return f"{what} {name!r}"

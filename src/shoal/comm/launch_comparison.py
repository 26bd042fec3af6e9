"""Compares what the ranks of a group are about to launch, collective by collective.

    rank 0   17th of group 0: the gather of unit 'a'       ┐
    rank 1   17th of group 0: the reduction of unit 'b'    ┴─ both raise, before anything is sent

Two collectives of one size can change places without hanging: ranks then compute with each other's
numbers. Here every rank puts a tag of each collective into the store of the job, and waits until
the last rank has compared them. No collective is involved, so one that only some ranks come to is
named after a time limit.
"""

from __future__ import annotations

import json
import os
import weakref
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal._torch import groups
from shoal.errors import RankError

LIMIT_S = 300.0
"""How long a rank waits for the others to come to the same collective."""
_AGREED = "agreed"
_ADVICE = (
    "Every rank must run the same modules in the same order. Where losses use different units, "
    "call set_reduce_scatter_unused_params(True)."
)


def is_wanted() -> bool:
    """Whether ranks compare every collective before they launch it: `SHOAL_DEBUG=collectives`."""
    return "collectives" in os.environ.get("SHOAL_DEBUG", "").split(",")


class LaunchComparison:
    """The tags of this process, and their comparison with those of others."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._stores: weakref.WeakKeyDictionary[dist.Store, dist.Store] = (
            weakref.WeakKeyDictionary()
        )
        self._groups: weakref.WeakKeyDictionary[ProcessGroup, _Group] = weakref.WeakKeyDictionary()
        self.step = 0
        """Counts the forwards of models. It is told and not compared: a rank that holds all
        parameters may evaluate by itself."""

    def check(self, what: str, group: ProcessGroup, tensor: Tensor | None) -> None:
        """Raise on all ranks of a group unless they are about to launch the same."""
        if type(group) is not ProcessGroup or dist.get_backend(group) == "fake":
            return  # its ranks are threads of this process, which take turns, or are imagined
        size = "" if tensor is None else f"{tensor.numel()} of {str(tensor.dtype)[6:]}"
        found = self._groups.get(group)
        if found is None:
            found = self._groups[group] = _Group(group, self._store())
        if len(found.ranks) > 1:
            found.compare({"what": what, "size": size, "step": self.step}, self._limit_s)

    def _store(self) -> dist.Store:
        """The store of the job, over a connection that a wait does not block for others."""
        default = groups.default_store()
        if default not in self._stores:
            self._stores[default] = store = groups.separate_store()
            store.set_timeout(timedelta(seconds=self._limit_s))
        return self._stores[default]


class _Group:
    """The collectives of one group, numbered as its ranks launch them."""

    def __init__(self, group: ProcessGroup, store: dist.Store) -> None:
        self._store = store
        self.ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._name: str = group.group_name
        # A group that was made anew may have the name of one that is gone.
        made = store.add(f"shoal/collectives/{self._name}/made/{self._rank}", 1)
        self._prefix = f"shoal/collectives/{self._name}/{made}"
        self._number = 0

    def compare(self, tag: Mapping[str, object], limit_s: float) -> None:
        """Wait until all ranks have come, and raise if they did not come to the same."""
        store, before = self._store, f"{self._prefix}/{self._number}"
        self._number += 1
        key = f"{self._prefix}/{self._number}"
        store.set(f"{key}/{self._rank}", json.dumps(tag))
        if store.add(f"{key}/count", 1) == len(self.ranks):
            store.set(f"{key}/verdict", self._difference(key) or _AGREED)
            for last in ("count", "verdict"):  # all have read it: they are here
                store.delete_key(f"{before}/{last}")
        try:
            verdict = store.get(f"{key}/verdict").decode()
        except dist.DistStoreError as error:
            raise RankError(self._absence(key, tag, limit_s)) from error
        store.delete_key(f"{before}/{self._rank}")
        if verdict != _AGREED:
            raise RankError(verdict)

    def _difference(self, key: str) -> str | None:
        """Name the ranks that are about to launch something else than most of them."""
        values = self._store.multi_get([f"{key}/{rank}" for rank in self.ranks])
        tags = {rank: json.loads(value) for rank, value in zip(self.ranks, values, strict=True)}
        counts = Counter((tag["what"], tag["size"]) for tag in tags.values())
        if len(counts) == 1:
            return None
        usual = counts.most_common(1)[0][0]
        first = next(r for r, tag in tags.items() if (tag["what"], tag["size"]) == usual)
        other = next(r for r, tag in tags.items() if (tag["what"], tag["size"]) != usual)
        return (
            f"ranks differ in collective {self._number} of group {self._name}: rank {first} is "
            f"about to launch {_text(tags[first])}, rank {other} {_text(tags[other])}. {_ADVICE}"
        )

    def _absence(self, key: str, tag: Mapping[str, object], limit_s: float) -> str:
        """Name the ranks that did not come."""
        missing = [rank for rank in self.ranks if not self._store.check([f"{key}/{rank}"])]
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return (
            f"{names} did not come to {_text(tag)} within {limit_s:g} s, collective "
            f"{self._number} of group {self._name}, where rank {self._rank} waits. {_ADVICE}"
        )


def _text(tag: Mapping[str, object]) -> str:
    size = f" ({tag['size']})" if tag["size"] else ""
    return f"{tag['what']}{size} in step {tag['step']}"

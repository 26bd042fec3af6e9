"""Where ranks meet in a loop: each says where it is, and all come to the same conclusion.

A meeting is one small all-gather on the host, before anything that ranks do together: a forward, a
backward, an optimizer's step. So a rank that would go another way is told before it can hang.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist

from shoal._torch import collectives, groups
from shoal.comm import observer
from shoal.errors import RankError

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for what another one is to write."""


class RankStatus(IntEnum):
    """What a rank is doing in the loop."""

    HAS_INPUTS = 0
    HAS_ENDED = 1
    HAS_FAILED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a meeting came to; the same on all ranks."""

    with_inputs: tuple[int, ...]
    """The ranks that go on, by their number in the group."""
    size: int

    @property
    def leader(self) -> int:
        """The rank whose moments others are told, if there are others."""
        return self.with_inputs[0]

    @property
    def is_over(self) -> bool:
        """Whether no rank goes on."""
        return not self.with_inputs

    @property
    def has_shadows(self) -> bool:
        """Whether a rank shadows others."""
        return 0 < len(self.with_inputs) < self.size


class Meetings:
    """The meetings of one loop, as one rank takes part in them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._rank = dist.get_rank()
        self.number_in_group = ranks.index(self._rank)
        self._group = _host_group(ranks) if len(ranks) > 1 else None
        self.store = groups.default_store()
        digest = hashlib.sha256(repr(ranks).encode()).hexdigest()[:12]
        # The store counts, not the process: ranks may be threads, and a new job has a new store.
        count = self.store.add(f"shoal/join/{digest}/count/{self._rank}", 1)
        self.key = f"shoal/join/{digest}/{count}"
        self.number = 0
        """How many there were."""

    def meet(self, status: RankStatus, described: Sequence[str], failure: str = "") -> Outcome:
        """Say where this rank is, in words that are the same on ranks that go on alike."""
        self.number += 1
        text = json.dumps(list(described))
        told = failure if status is RankStatus.HAS_FAILED else text
        if status is RankStatus.HAS_FAILED:  # before anybody looks for it
            self.store.set(self._text_key(self.number_in_group), told)
        rows = self._gathered(status, text)
        failed = [at for at, row in enumerate(rows) if row[0] == RankStatus.HAS_FAILED]
        if failed:
            raise RankError(
                f"rank {self.ranks[failed[0]]} left the loop in shoal.join: "
                f"{self._text_of(failed[0])}"
            )
        going = tuple(at for at, row in enumerate(rows) if row[0] == RankStatus.HAS_INPUTS)
        differing = [at for at in going if rows[at][1] != rows[going[0]][1]]
        if differing:
            self._accuse(going[0], differing[0], text)
        return Outcome(with_inputs=going, size=len(rows))

    def _gathered(self, status: RankStatus, text: str) -> list[list[int]]:
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        mine = torch.tensor([status, digest])
        if self._group is None:
            return [mine.tolist()]
        rows = mine.new_empty(len(self.ranks), 2)
        with observer.waiting("a meeting of the ranks in shoal.join"):
            collectives.gather_method(self._group)(rows.view(-1), mine).wait()
        return rows.tolist()

    def _accuse(self, one: int, other: int, text: str) -> None:
        """Raise on every rank: two of them go different ways."""
        if self.number_in_group in (one, other):
            self.store.set(self._text_key(self.number_in_group), text)
        a, b = (json.loads(self._text_of(at)) for at in (one, other))
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        at = min(len(a), len(b)) if at is None else at
        mine, theirs = (said[at] if at < len(said) else "nothing more" for said in (a, b))
        raise RankError(
            f"ranks go different ways in shoal.join: rank {self.ranks[one]} has come to {mine}, "
            f"rank {self.ranks[other]} to {theirs}. As long as they have inputs, all ranks must "
            "run the same models, backwards and optimizers in the same order."
        )

    def _text_key(self, at: int) -> str:
        return f"{self.key}/{self.number}/text/{at}"

    def _text_of(self, at: int) -> str:
        key = self._text_key(at)
        self.store.wait([key], PATIENCE)
        return self.store.get(key).decode()


_host_groups: dict[tuple[int, ...], tuple[dist.ProcessGroup | None, dist.ProcessGroup]] = {}
"""Groups of ranks that meet on the host, with the default group of their time."""


def _host_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """A group of these ranks whose collectives the host takes part in, whatever the device."""
    default = dist.group.WORLD
    assert default is not None
    if groups.serves_host(default) and ranks == tuple(range(dist.get_world_size())):
        return default
    known = _host_groups.get(ranks)
    if known is None or known[0] is not default:
        made = dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        known = _host_groups[ranks] = default, made
    return known[1]

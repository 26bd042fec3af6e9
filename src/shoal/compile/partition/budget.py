"""A memory budget: how much of what forward would keep it may keep.

1    what is kept when only cheap work is done again
0    as little as can be kept
between, so much of the way; the most work is kept that fits
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from torch import fx

from shoal.compile.partition.bans import Ban, Strength, find_bans
from shoal.compile.partition.cost import kept_bytes, work
from shoal.compile.partition.joint import Joint
from shoal.compile.partition.keep import keep

MAX_STEPS = 10_000
"""How finely memory is counted where exact sizes would take too long."""

MAX_ATTEMPTS = 8
"""How often a choice that turned out too large is made smaller."""


def keep_within(joint: Joint, budget: float, *, static: Collection[fx.Node]) -> list[fx.Node]:
    """The values to keep within a budget between 0 and 1."""
    if not 0 <= budget <= 1:
        raise ValueError(f"expected a memory budget between 0 and 1, got {budget}")
    bans = find_bans(joint)
    most = keep(joint, bans, static=static)
    if budget == 1:
        return most
    least = keep(joint, _firm(bans, Strength.ALWAYS), static=static)
    floor, ceiling = _total(least, static), _total(most, static)
    allowed = floor + int(budget * max(ceiling - floor, 0))
    for kept in (most, keep(joint, _firm(bans, Strength.WORK), static=static)):
        if _total(kept, static) <= allowed:
            return kept
    return _keep_most_work(joint, bans, allowed, floor, static)


def most_worth(sizes: Sequence[int], worth: Sequence[int], capacity: int) -> list[int]:
    """The places of the things to pack, worth the most together and no larger than the capacity."""
    if capacity <= 0:
        return [place for place, size in enumerate(sizes) if size == 0]
    step = math.gcd(*sizes) or 1
    step = max(step, -(-capacity // MAX_STEPS))
    room = capacity // step
    needed = [-(-size // step) for size in sizes]
    best = np.zeros(room + 1, dtype=np.int64)
    taken = np.zeros((len(sizes), room + 1), dtype=bool)
    for place, (size, gain) in enumerate(zip(needed, worth, strict=True)):
        if size > room:
            continue
        with_it = best[: room + 1 - size] + gain
        taken[place, size:] = with_it > best[size:]
        best[size:] = np.maximum(best[size:], with_it)
    chosen = []
    for place in reversed(range(len(sizes))):
        if taken[place, room]:
            chosen.append(place)
            room -= needed[place]
    return sorted(chosen)


def _keep_most_work(
    joint: Joint,
    bans: Mapping[fx.Node, Ban],
    allowed: int,
    floor: int,
    static: Collection[fx.Node],
) -> list[fx.Node]:
    firm = _firm(bans, Strength.ALWAYS)
    loose = [node for node, ban in bans.items() if ban.strength is Strength.WORK]
    sizes = [kept_bytes(node) for node in loose]
    gains = [work(node) for node in loose]
    capacity = allowed - floor
    kept = keep(joint, firm, static=static)
    for _ in range(MAX_ATTEMPTS):
        chosen = [loose[place] for place in most_worth(sizes, gains, capacity)]
        kept = keep(joint, {**firm, **{node: bans[node] for node in chosen}}, static=static)
        over = _total(kept, static) - allowed
        if over <= 0 or capacity <= 0:
            break
        # Values that keep each other company were counted apart: leave as much room for them.
        capacity = max(capacity - over, 0)
    return kept


def _firm(bans: Mapping[fx.Node, Ban], least: Strength) -> dict[fx.Node, Ban]:
    return {node: ban for node, ban in bans.items() if ban.strength >= least}


def _total(kept: Sequence[fx.Node], static: Collection[fx.Node]) -> int:
    return sum(kept_bytes(node) for node in kept if node not in static)

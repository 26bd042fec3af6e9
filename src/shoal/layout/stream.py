"""Streaming: choose how large the shards of a ragged packing are, so that little is wasted.

A parameter may be cut only between its quanta: elements, rows or blocks. A quantum that does not
fit in the rest of a rank's buffer goes to the next rank and leaves a gap. A gap inside a parameter
costs a copy when it is gathered, so a somewhat larger shard without such gaps is preferred to the
smallest shard that everything fits in.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from shoal.layout.packing import check_packable, shard_step_bytes
from shoal.layout.ragged import RUN_OF_NOTHING, ParamRun, RaggedPacking
from shoal.layout.spec import ALIGN_NUMEL, ParamSpec, round_up

MAX_GROWTH = Fraction(1, 8)
"""By how much a shard without gaps may be larger than the smallest one."""

_ROUNDS = 4
"""How often more parameters may join those whose gaps are closed; each round costs a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grain:
    """How a parameter may be cut: between quanta of so many elements; and how its start aligns."""

    param: ParamSpec
    quantum: int
    align: int = ALIGN_NUMEL

    def start_at(self, rank: int, end_bytes: int, shard_bytes: int) -> ParamRun | None:
        """The run that starts here or, where no quantum fits any more, on the next rank."""
        param = self.param
        quantum = min(self.quantum, param.numel)
        later = _whole(shard_bytes // param.itemsize, quantum)
        if later == 0:
            return None
        offset_bytes = round_up(end_bytes, self.align * param.itemsize)
        room = max(shard_bytes - offset_bytes, 0) // param.itemsize
        if room < quantum:
            rank, offset_bytes, room = rank + 1, 0, shard_bytes // param.itemsize
        first = param.numel if param.numel <= room else _whole(room, quantum)
        return ParamRun(
            rank=rank, offset_bytes=offset_bytes, first=first, later=later, align=self.align
        )


def pack_stream(
    params: Sequence[ParamSpec],
    quanta: Sequence[int],
    world_size: int,
    *,
    by_rows: bool = False,
    spreads: bool = False,
) -> RaggedPacking:
    """Stream parameters through the ranks, each cut between quanta of so many elements.

    With `spreads`, ranks are not filled up to the alignment of their buffers where that costs too
    much.
    """
    check_packable(params, world_size)
    grains = [Grain(param=p, quantum=q) for p, q in zip(params, quanta, strict=True)]
    step = shard_step_bytes(params)
    smallest_bytes = _smallest(grains, world_size, step, _upper_bound(grains, step))
    assert smallest_bytes is not None, "one rank alone holds everything at the upper bound"
    runs = _without_gaps(grains, world_size, smallest_bytes)
    if runs is None:
        runs = _stream(grains, world_size, smallest_bytes)
    if spreads:
        runs = _spread(grains, world_size, smallest_bytes) or runs
    assert runs is not None, "the search ends at a size that fits"
    # A size without gaps is a multiple of many quanta; if nothing crosses ranks, less will do.
    used_bytes = max((r.used_bytes(p) for r, p in zip(runs, params, strict=True)), default=0)
    return RaggedPacking(
        params=tuple(params),
        world_size=world_size,
        shard_bytes=round_up(used_bytes, step),
        runs=tuple(runs),
        by_rows=by_rows,
    )


def _without_gaps(
    grains: Sequence[Grain], world_size: int, smallest_bytes: int
) -> list[ParamRun] | None:
    """The runs through the smallest shard without gaps, or None where that costs too much.

    No gap arises where both the shard and the parameter's start are multiples of its quantum.
    Only parameters that cross from rank to rank need it; which do is known after each attempt.
    """
    grains = list(grains)
    limit = int(smallest_bytes * (1 + MAX_GROWTH))
    step = shard_step_bytes([grain.param for grain in grains])
    shard_bytes: int | None = smallest_bytes
    for _ in range(_ROUNDS):
        runs = _stream(grains, world_size, shard_bytes)
        assert runs is not None, "the search ends at a size that fits"
        gapped = [
            index
            for index, (grain, run) in enumerate(zip(grains, runs, strict=True))
            if not run.is_one_run(grain.param, shard_bytes)
        ]
        if not gapped:
            return runs
        for index in gapped:
            grain = grains[index]
            align = math.lcm(ALIGN_NUMEL, grain.quantum)
            grains[index] = replace(grain, align=align)
            step = math.lcm(step, align * grain.param.itemsize)
        shard_bytes = _smallest(grains, world_size, step, limit)
        if shard_bytes is None:
            return None
    return None


def _spread(grains: Sequence[Grain], world_size: int, aligned_bytes: int) -> list[ParamRun] | None:
    """The runs through ranks filled only as far as needed; None where alignment costs little."""
    step = max((grain.param.itemsize for grain in grains), default=1)
    needed_bytes = _smallest(grains, world_size, step, aligned_bytes)
    assert needed_bytes is not None, "the aligned size fits"
    if aligned_bytes <= needed_bytes * (1 + MAX_GROWTH):
        return None
    return _stream(grains, world_size, needed_bytes)


def _smallest(grains: Sequence[Grain], world_size: int, step: int, at_most: int) -> int | None:
    """The smallest multiple of `step` that every parameter fits in; a larger one fits too."""
    total = sum(grain.param.nbytes for grain in grains)
    low = -(-total // (world_size * step))
    high = at_most // step
    if low > high or _stream(grains, world_size, high * step) is None:
        return None
    return step * bisect_left(
        range(high), True, lo=low, key=lambda n: _stream(grains, world_size, n * step) is not None
    )


def _stream(grains: Sequence[Grain], world_size: int, shard_bytes: int) -> list[ParamRun] | None:
    """The runs of all parameters through shards of this size, or None where they do not fit."""
    runs: list[ParamRun] = []
    rank = end_bytes = 0
    for grain in grains:
        param = grain.param
        if param.numel == 0:
            runs.append(RUN_OF_NOTHING)
            continue
        run = grain.start_at(rank, end_bytes, shard_bytes)
        if run is None:
            return None
        rank, end_bytes = run.end(param)
        if rank >= world_size:
            return None
        runs.append(run)
    return runs


def _upper_bound(grains: Sequence[Grain], step: int) -> int:
    """A shard that holds everything on one rank."""
    end = 0
    for grain in grains:
        end = round_up(end, grain.param.align_bytes) + grain.param.nbytes
    return round_up(end, step)


def _whole(numel: int, quantum: int) -> int:
    return numel // quantum * quantum

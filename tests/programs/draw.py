"""Random programs, drawn by Hypothesis."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import strategies as st

from programs import moments
from programs.moments import Moment
from programs.net import NUM_CELLS, Way
from programs.program import Program
from programs.twins import Setup, ShardingApi
from shoal.layout import Block, Even, Flat, Layout, Rows, Whole

LAYOUTS: tuple[Layout, ...] = (Even(), Flat(), Rows(), Block(4), Whole())


@st.composite
def programs(
    draw: Any,
    world_size: int,
    *,
    api: ShardingApi = "fully_shard",
    compiles: bool = False,
    compiled: Literal["", "model", "cells"] = "",
) -> Program:
    """Programs of a dozen moments at most."""
    is_parallel = api == "fully_shard" and not (compiles or compiled) and draw(st.booleans())
    way = _parallel_ways(world_size) if is_parallel else _chains()
    steps = _steps(way)
    if not compiled:  # which would raise when it is traced
        flags, cells = st.booleans(), st.integers(0, NUM_CELLS - 1)
        steps += [st.builds(moments.FailInForward, cells)]
        steps += [st.builds(moments.FailInBackward, cells, flags, flags)]
    if api == "fully_shard":
        steps += _steps_of_fully_shard()
    if not (compiles or compiled):  # torch differentiates no compiled graph twice
        steps += [st.builds(moments.Penalise, way, st.booleans(), st.booleans())]
    if compiles:
        steps += [st.builds(moments.Compiled, st.integers(1, 3))] * 4
    if api == "fully_shard" and not is_parallel:
        # With set_reduce_scatter_unused_params(True) any backward gives all parameters a gradient.
        steps += [st.builds(moments.GradOfInputs, st.integers(1, NUM_CELLS))]
    if api == "fully_shard" and not compiles:
        steps += [st.builds(moments.Divide, st.sampled_from([1.0, 2.0, 3.0]))]
    return Program(
        draw(_setups(is_parallel, api, world_size, compiled)),
        draw(st.lists(st.one_of(steps), min_size=1, max_size=12)),
    )


def _setups(
    is_parallel: bool, api: ShardingApi, world_size: int, compiled: str
) -> st.SearchStrategy[Setup]:
    kinds = st.sampled_from(["plain", "twice", "recomputed"])
    return st.builds(
        Setup,
        kinds=st.tuples(*[kinds] * NUM_CELLS),
        layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * (NUM_CELLS + 1)),
        reshards=st.tuples(*[st.booleans()] * (NUM_CELLS + 1)),
        optimizer=st.sampled_from(["AdamW", "SGD"]),
        is_parallel=st.just(is_parallel),
        api=st.just(api),
        compiled=st.just(compiled),
        is_hybrid=st.booleans() if world_size == 4 and api == "fully_shard" else st.just(False),
        is_tied=st.booleans(),
    )


def _chains() -> st.SearchStrategy[Way]:
    """Ways that are the same on all ranks."""
    cuts = st.none() | st.none() | st.integers(0, NUM_CELLS - 1)
    return st.builds(Way, num_cells=st.integers(1, NUM_CELLS), detaches_at=cuts)


def _parallel_ways(world_size: int) -> st.SearchStrategy[Way]:
    """Ways on which each rank uses its own choice of cells."""
    uses = st.tuples(*[st.booleans()] * NUM_CELLS)
    return st.builds(Way, is_parallel=st.just(True), uses=st.tuples(*[uses] * world_size))


def _steps(way: st.SearchStrategy[Way]) -> list[st.SearchStrategy[Moment]]:
    flags, cells = st.booleans(), st.integers(0, NUM_CELLS - 1)
    names = st.sampled_from(["up.weight", "up.bias", "down.weight", "gain"])
    some = st.lists(names, min_size=1, unique=True).map(tuple)
    return [
        *[st.builds(moments.Train, way, flags)] * 2,
        *[st.builds(moments.Update, way, flags, flags)] * 2,
        st.builds(moments.Evaluate, way, st.sampled_from(["recorded", "no_grad", "inference"])),
        st.builds(moments.TwoForwards, st.tuples(way, way), flags, flags),
        st.builds(moments.TwoBackwards, way),
        st.builds(moments.ZeroBetween, way, flags),
        st.builds(moments.Freeze, cells, some, flags),
        st.builds(moments.Scale, st.sampled_from([0.9, 1.1])),
        st.builds(moments.Full, flags),
    ]


def _steps_of_fully_shard() -> list[st.SearchStrategy[Moment]]:
    flags, cells = st.booleans(), st.integers(0, NUM_CELLS - 1)
    alone = st.builds(Way, num_cells=st.integers(1, NUM_CELLS), is_alone=st.just(True))
    return [
        st.builds(moments.SaveAndLoad, flags),
        st.builds(moments.Train, alone, flags),
        st.builds(moments.Prefetch, cells, st.lists(cells, max_size=3).map(tuple), flags),
        st.builds(moments.Cast),
        st.builds(moments.FullState),
        st.builds(moments.NewOptimizers),
        st.builds(moments.Hold, st.none() | cells, flags, flags),
        st.builds(moments.Reshard, flags, flags),
    ]

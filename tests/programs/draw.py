"""Random programs, drawn by Hypothesis."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import strategies as st

from programs import moments
from programs.moments import Moment
from programs.net import NUM_CELLS, Oddity, Way
from programs.program import Program
from programs.twins import Precision, Setup, ShardingApi
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
    # What `_setups` and `_steps_of_eager` draw was never run by the wrapper or in graphs.
    is_eager = api == "fully_shard" and not (compiles or compiled)
    is_parallel = bool(is_eager and draw(st.booleans()))
    way = _parallel_ways(world_size) if is_parallel else _chains()
    steps = _steps(way)
    if is_eager:
        steps += _steps_of_eager(way)
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
    setup = draw(_setups(is_parallel, is_eager, api, world_size, compiled))
    if api == "fully_shard" and not setup.gives_zeros:
        # With set_reduce_scatter_unused_params(True) any backward gives all parameters a gradient.
        steps += [st.builds(moments.GradOfInputs, st.integers(1, NUM_CELLS))]
    # Checkpoints and sparse gradients are not for torch's transforms.
    if is_eager and "recomputed" not in setup.kinds and "sparse" not in setup.oddities:
        steps += [st.builds(moments.Transform, way)]
    if setup.precision:
        steps += [st.builds(moments.Keep, st.booleans())]
    if api == "fully_shard" and not compiles:
        steps += [st.builds(moments.Divide, st.sampled_from([1.0, 2.0, 3.0]))]
    return Program(setup, draw(st.lists(st.one_of(steps), min_size=1, max_size=12)))


@st.composite
def _setups(
    draw: Any,
    is_parallel: bool,
    is_eager: bool,
    api: ShardingApi,
    world_size: int,
    compiled: Literal["", "model", "cells"],
) -> Setup:
    kinds = st.sampled_from(["plain", "twice", "recomputed"])
    oddities: list[Oddity] = ["scalar", "transposed", "sparse", "complex"]
    precisions: list[Precision] = ["", "", "low", "kept"] if is_eager else [""]
    flags, is_hybrid = st.booleans(), False
    layouts = tuple(draw(st.sampled_from(LAYOUTS)) for _ in range(NUM_CELLS + 1))
    if api == "fully_shard":
        is_hybrid = bool(world_size == 4 and draw(flags))
    # A piece of two ranks may be kept of four.
    keeps_pieces = world_size == 4 and is_eager and not is_hybrid
    reshards = [
        st.sampled_from([False, True, 2]) if keeps_pieces and isinstance(layout, Even) else flags
        for layout in layouts
    ]
    return Setup(
        kinds=draw(st.tuples(*[kinds] * NUM_CELLS)),
        layouts=layouts,
        reshards=draw(st.tuples(*reshards)),
        optimizer=draw(st.sampled_from(["AdamW", "SGD"])),
        is_parallel=is_parallel,
        api=api,
        compiled=compiled,
        is_hybrid=is_hybrid,
        is_tied=draw(flags),
        oddities=tuple(
            draw(st.lists(st.sampled_from(oddities), unique=True, max_size=3 if is_eager else 0))
        ),
        precision=draw(st.sampled_from(precisions)),
        reduces_unused=is_eager and draw(st.integers(0, 3)) == 3,
        has_sections=is_eager and draw(flags),
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
        _evaluations(way),
        st.builds(moments.TwoForwards, st.tuples(way, way), flags, flags),
        st.builds(moments.TwoBackwards, way),
        st.builds(moments.ZeroBetween, way, flags),
        st.builds(moments.Freeze, cells, some, flags),
        st.builds(moments.Scale, st.sampled_from([0.9, 1.1])),
        st.builds(moments.Full, flags),
    ]


def _evaluations(way: st.SearchStrategy[Way]) -> st.SearchStrategy[moments.Evaluate]:
    return st.builds(moments.Evaluate, way, st.sampled_from(["recorded", "no_grad", "inference"]))


def _steps_of_eager(way: st.SearchStrategy[Way]) -> list[st.SearchStrategy[Moment]]:
    flags = st.booleans()
    return [
        st.builds(moments.EvaluateBetween, way, _evaluations(way), flags),
        st.builds(moments.Zero, flags, flags),
        st.builds(moments.FreezePart, st.sampled_from(["first", "cells"]), flags),
        st.builds(moments.SaveAndLoad, flags, st.just(True)),
        st.builds(moments.ScaleData, st.sampled_from([0.9, 1.1])),
        st.builds(moments.LookAhead, st.integers(0, 3), st.integers(1, 3)),
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

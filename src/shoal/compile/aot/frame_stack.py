"""Call the functions of large graphs on a piece of frame stack of their own.

CPython puts the frames of Python functions one after the other into a piece of memory, 16 KiB in
most cases. Where the next does not fit, it gets a new piece from the operating system, which goes
back when that frame ends. A graph's function has a variable for each value. If its frame fills a
piece but for a little, each call out of it pays for such a piece: 6 us, for hundreds of kernels a
step. It is chance whether that happens: it depends on the frames below too.

Called from a frame that claims much more than it uses, the function starts in a piece of its own,
of which at least half is free. Memory that nobody touches costs nothing.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from shoal.compile.aot.graph_code import Boxed, DirectGraph
from shoal.compile.aot.inner import Inner, Task

_LARGE = 128
"""So many calls in a graph are worth the price of a piece, about 10 us."""

_FRAMES_ABOVE = 2048
"""Variables of the functions that the graph's function calls, and that these call."""


def with_frame_stack(inner: Inner) -> Inner:
    """An inner compiler whose functions, if their graphs are large, get their own frame stack."""
    if sys.implementation.name != "cpython":
        return inner

    def compiled(task: Task) -> Boxed:
        run = inner(task)
        num_values = len(task.module.graph.nodes)
        if num_values < _LARGE:
            return run
        function = run.function if isinstance(run, DirectGraph) else run
        return called_on_own_stack(function, num_values)

    return compiled


def called_on_own_stack(run: Boxed, num_values: int) -> Boxed:
    """`run`, called on a new piece of stack for its frame of `num_values` variables and more."""

    def call(inputs: list[Any]) -> list[Any]:
        return run(inputs)

    # Pieces are powers of two. Half of one, and what CPython adds, needs the whole.
    claimed = 1 << (2 * num_values + _FRAMES_ABOVE).bit_length()
    code = call.__code__.replace(co_stacksize=claimed)
    return FunctionType(code, call.__globals__, call.__name__, None, call.__closure__)

"""Frames of large graphs' functions: no memory is asked for at each call out of them."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest

from shoal.compile.aot.frame_stack import called_on_own_stack

NUM_CALLS = 100


def callee(*args: Any, **kwargs: Any) -> None:
    """It has a frame in Python, as the functions that launch kernels have."""
    return inner_callee(*args, **kwargs)


def inner_callee(*args: Any, **kwargs: Any) -> None:
    assert kwargs["stream"] == 1
    assert args


def function_of(num_values: int) -> Callable[[list[Any]], list[Any]]:
    """As generated code is: many variables, many calls."""
    lines = ["def run(inputs):", *(f"    v{i} = None" for i in range(num_values))]
    lines += [f"    for _ in range({NUM_CALLS}):", "        callee(0, stream=1)"]
    lines += ["    return inputs"]
    names: dict[str, Any] = {"callee": callee}
    exec("\n".join(lines), names)
    return names["run"]


def faults_of(function: Callable[[list[Any]], list[Any]]) -> int:
    """Pages that were new in one of three calls, the least."""
    counts: list[int] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        assert function([3]) == [3]
        counts.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)
    return min(counts)


def test_no_new_memory_at_each_call() -> None:
    sizes = range(1024, 2048, 6)
    functions = {size: function_of(size) for size in sizes}
    unlucky = [size for size in sizes if faults_of(functions[size]) >= NUM_CALLS]
    if not unlucky:
        pytest.skip("this interpreter has no frame sizes that cost memory at each call")
    with_frame_stack = {
        size: faults_of(called_on_own_stack(functions[size], size)) for size in sizes
    }
    assert max(with_frame_stack.values()) < NUM_CALLS // 4, (unlucky, with_frame_stack)

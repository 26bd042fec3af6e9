"""Arguments that share memory otherwise than those that a function was compiled for.

A graph that writes to one argument holds for the memory that others had in common with it, and at
which offsets. Of its own, nobody in front of it compares that: Dynamo's guards are on shapes and
strides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor

from shoal import _torch
from shoal.compile.aot.lowered import Lowered


def where_shared_alike(
    run: Callable[..., Any],
    function: Callable[..., Any],
    lowered: Lowered,
    args: Sequence[Any],
    fixed: Collection[int] = (),
) -> Callable[..., Any]:
    """`run` for arguments that share memory as `args` do, the `function` itself for all others.

    `args` are those it was compiled for. Those in `fixed` stay where they are. A graph that writes
    to none of the others needs no comparison.
    """
    sources = lowered.arrangement.sources
    moving = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and i not in fixed]
    is_written = any(
        (one.mutation.data or one.mutation.is_set) and sources[at] not in fixed
        for at, one in enumerate(lowered.signature.inputs)
    )
    if not is_written or any(isinstance(args[i], _torch.FakeTensor) for i in moving):
        return run
    still = {_torch.storage_key(args[i]): i for i in fixed if isinstance(args[i], Tensor)}
    expected = _sharing(args, moving, still)

    def call(*values: Any) -> Any:
        if _sharing(values, moving, still) == expected:
            return run(*values)
        return function(*values)

    return call


def guard_sharing(
    lowered: Lowered, args: Sequence[Any], sources: Sequence[Any], fixed: Collection[int] = ()
) -> None:
    """Have Dynamo compile anew for arguments that overlap otherwise, if one of them is written to.

    `sources` say where Dynamo finds arguments, None where it does not. It does not compare all
    that `where_shared_alike` does: what it lets pass runs uncompiled.
    """
    places, inputs = lowered.arrangement.sources, lowered.signature.inputs
    written = {
        _torch.storage_key(args[places[at]]) for at, one in enumerate(inputs) if one.mutation.data
    }
    by_storage: dict[int, list[int]] = {}
    for i, arg in enumerate(args):
        if isinstance(arg, Tensor) and sources[i] is not None and i not in fixed:
            key = _torch.storage_key(arg)
            if key in written and key is not None:
                by_storage.setdefault(key, []).append(i)
    for group in by_storage.values():
        if len(group) > 1:
            overlapping = _torch.overlapping([args[i] for i in group])
            _torch.guard_overlap(
                [sources[i] for at, i in enumerate(group) if at in overlapping],
                [sources[i] for at, i in enumerate(group) if at not in overlapping],
            )


def _sharing(
    args: Sequence[Any], moving: Sequence[int], still: dict[int | None, int]
) -> list[tuple[int, int, int, int]]:
    """Each argument in the memory of an earlier one: both places, and where in it they begin."""
    seen = dict(still)
    found: list[tuple[int, int, int, int]] = []
    for i in moving:
        key = _torch.storage_key(args[i])
        first = seen.setdefault(key, i)
        if first != i and key is not None:
            found.append((i, first, args[i].storage_offset(), args[first].storage_offset()))
    return found

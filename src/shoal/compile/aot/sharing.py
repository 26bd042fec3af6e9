"""Check that arguments share memory as the arguments did that a function was compiled for.

A graph that writes to one argument is right only if the same arguments share memory with it, at the
same offsets. A graph that counts elements from the begin of the memory, as `as_strided` does, is
right only if its arguments have the same offsets. Dynamo does not check that: its guards are on
shapes and strides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from shoal._torch import dynamo, fakes, storage
from shoal.compile.aot.arrange import sharing_memory
from shoal.compile.aot.lowered import Lowered
from shoal.compile.aot.signature import OutputKind
from shoal.compile.aot.subclasses import places
from shoal.compile.node_kinds import NodeKind, kind, op_name


def where_shared_alike(
    run: Callable[..., Any],
    function: Callable[..., Any],
    lowered: Lowered,
    args: Sequence[Any],
    fixed: Collection[int] = (),
) -> Callable[..., Any]:
    """`run` for arguments that share memory as `args` do, the `function` itself for all others.

    `run` was compiled for `args`. Those in `fixed` stay where they are. A graph that neither writes
    to another one, nor counts elements from the begin of its memory, needs no comparison.
    """
    sources = lowered.arrangement.sources
    moving = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and i not in fixed]
    is_written = any(
        (one.mutation.data or one.mutation.is_set) and sources[at] not in fixed
        for at, one in enumerate(lowered.signature.inputs)
    )
    placed = [i for i in _counted_in(lowered) if i in moving]
    if not (is_written or placed) or any(isinstance(args[i], fakes.FakeTensor) for i in moving):
        return run
    offsets = [args[i].storage_offset() for i in placed]
    if not is_written:
        moving = []
    still = {storage.storage_key(args[i]): i for i in fixed if isinstance(args[i], Tensor)}
    expected = _sharing(args, moving, still)

    def call(*values: Any) -> Any:
        are_there = [values[i].storage_offset() for i in placed] == offsets
        if are_there and _sharing(values, moving, still) == expected:
            return run(*values)
        return function(*values)

    return call


def _counted_in(lowered: Lowered) -> set[int]:
    """The arguments that `as_strided` reads, in a graph or to make an output."""
    signature, sources = lowered.signature, lowered.arrangement.sources
    shown = (one for one in signature.outputs if one.kind is OutputKind.VIEW_OF_INPUT)
    views = [(one.of, one.steps) for one in shown]
    views += [(one.argument, one.steps) for one in signature.reshapes]
    found = {of for of, steps in views if any("as_strided" in step.op for step in steps)}
    inputs = {
        node.name: sources[at]
        for node, at in zip(
            lowered.forward.graph.find_nodes(op="placeholder"),
            (i for i, place in enumerate(places(lowered.wrappings.inputs)) for _ in place),
            strict=True,
        )
    }
    for module in (lowered.forward, lowered.backward):
        for node in () if module is None else module.graph.nodes:
            if op_name(node).startswith("aten::as_strided") and (name := _root_of(node)) in inputs:
                found.add(inputs[name])
    return found


def _root_of(node: Node) -> str:
    """The name of the node that the first argument of an operator is a view of."""
    root = node.all_input_nodes[0]
    while kind(root) is NodeKind.VIEW:
        root = root.all_input_nodes[0]
    return root.name


def guard_sharing(
    lowered: Lowered, args: Sequence[Any], sources: Sequence[Any], fixed: Collection[int]
) -> None:
    """Have Dynamo compile anew for arguments that overlap otherwise, if one of them is written to.

    `sources` say where Dynamo finds arguments, None where it does not. It does not compare all
    that `where_shared_alike` does: what it lets pass runs uncompiled.
    """
    inputs = zip(lowered.arrangement.sources, lowered.signature.inputs, strict=True)
    written = {storage.storage_key(args[i]) for i, one in inputs if one.mutation.data}
    found = [
        arg if sources[i] is not None and i not in fixed else None for i, arg in enumerate(args)
    ]
    for group in sharing_memory(found):
        if len(group) > 1 and storage.storage_key(args[group[0]]) in written:
            overlapping = dynamo.overlapping([args[i] for i in group])
            dynamo.guard_overlap(
                [sources[i] for at, i in enumerate(group) if at in overlapping],
                [sources[i] for at, i in enumerate(group) if at not in overlapping],
            )


def _sharing(
    args: Sequence[Any], moving: Sequence[int], still: dict[int | None, int]
) -> list[tuple[int, int, int, int]]:
    """Each argument that shares memory with an earlier one: both numbers, and both offsets."""
    seen = dict(still)
    found: list[tuple[int, int, int, int]] = []
    for i in moving:
        key = storage.storage_key(args[i])
        first = seen.setdefault(key, i)
        if first != i and key is not None:
            found.append((i, first, args[i].storage_offset(), args[first].storage_offset()))
    return found

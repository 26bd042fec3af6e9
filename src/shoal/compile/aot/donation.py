"""Which of the tensors saved for backward it may write over: nobody else can see them.

A compiler of backward then puts results where activations were, instead of into new memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from shoal._torch import storage, subclasses
from shoal.compile.aot.lowered import Lowered, outputs_of


def donated_by(lowered: Lowered, backward: GraphModule) -> tuple[int, ...]:
    """The inputs of a backward graph that may be written over, when it runs for the last time.

    Not what shares memory with an input or an output of forward, with a gradient, or with
    something else that was saved.
    """
    forward_inputs = lowered.forward.graph.find_nodes(op="placeholder")
    visible = outputs_of(lowered.forward)[: lowered.num_visible]
    seen = _memory_of([*forward_inputs, *visible])
    returned = _memory_of(outputs_of(backward))
    if seen is None or returned is None:
        return ()
    saved = {node.name: _memory(node) for node in lowered.saved if isinstance(node, Node)}
    times = Counter(saved.values())
    return tuple(
        at
        for at, node in enumerate(backward.graph.find_nodes(op="placeholder"))
        if (memory := saved.get(node.name)) is not None
        and memory not in seen
        and times[memory] == 1
        and (taken := _memory(node)) is not None
        and taken not in returned
    )


def _memory_of(nodes: Iterable[Any]) -> set[int] | None:
    """The memory that some nodes lie in; None where that cannot be told."""
    found: set[int] = set()
    for node in nodes:
        if not isinstance(node, Node) or not isinstance(node.meta.get("val"), Tensor):
            if isinstance(node, Node) and "val" not in node.meta:
                return None
            continue
        memory = _memory(node)
        if memory is None:
            return None
        found.add(memory)
    return found


def _memory(node: Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or subclasses.wraps_others(value):
        return None
    return storage.storage_key(value)

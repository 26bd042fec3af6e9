"""What autograd and compilers need to know of a backward graph, found by reading it.

`dependence_of`   which incoming gradients (tangents) each outgoing gradient depends on
`overlapping_gradients`       which outgoing gradients lie in the memory of an earlier one
`donated_by`      which saved tensors the graph may write over
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shoal._torch import storage, subclasses, symbols
from shoal.compile.aot.arrange import may_overlap
from shoal.compile.aot.lowered import Lowered, outputs_of
from shoal.compile.aot.subclasses import Wrappings, places


def dependence_of(
    graph: Graph, tangents: Sequence[object], wrappings: Wrappings
) -> tuple[frozenset[int], ...]:
    """For each gradient of a backward graph, the tangents it depends on, by their numbers.

    Of `tangents`, the parts of all tangents, the graph takes those that are not None, last.
    """
    nodes = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    numbers = [
        number
        for number, place in enumerate(places(wrappings.tangents, symbols=False))
        for at in place
        if tangents[at] is not None
    ]
    taken = inputs[len(inputs) - len(numbers) :]
    found: dict[Node, frozenset[int]] = {
        node: frozenset((number,)) for node, number in zip(taken, numbers, strict=True)
    }
    for node in nodes:
        if node not in found:
            found[node] = frozenset().union(*(found[one] for one in node.all_input_nodes))
    results: list[Any] = list(nodes[-1].args[0])  # type: ignore[arg-type]
    return tuple(
        frozenset().union(*(found[results[at]] for at in place if isinstance(results[at], Node)))
        for place in places(wrappings.gradients)
    )


def overlapping_gradients(graph: Graph) -> tuple[int, ...]:
    """Which of the gradients that a backward graph returns have elements of an earlier one."""
    found: list[int] = []
    kept: dict[int, list[Node]] = {}
    for at, node in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
        held = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(held, Tensor) or (key := storage.storage_key(held)) is None:
            continue
        earlier = kept.setdefault(key, [])
        # One tensor returned twice is copied by autograd itself.
        if node not in earlier and any(_meet(one.meta["val"], held) for one in earlier):
            found.append(at)
        else:
            earlier.append(node)
    return tuple(found)


def _meet(one: Tensor, two: Tensor) -> bool:
    """Whether they have elements in common, or may have: sizes that are open are not asked for."""
    return bool(symbols.symbols_in(one) or symbols.symbols_in(two)) or may_overlap(one, two)


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

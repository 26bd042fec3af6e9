"""`Lowered`: the graphs of a function, and the data that the generated code around them needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from shoal._torch import dynamo, storage, subclasses, symbols
from shoal.compile.aot.arrange import Arrangement, may_overlap
from shoal.compile.aot.signature import Signature
from shoal.compile.aot.subclasses import Wrappings, places


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """The result of tracing: the stages after it do not need the function."""

    signature: Signature
    arrangement: Arrangement
    wrappings: Wrappings
    forward: GraphModule
    backward: GraphModule | None = None
    """None if there is nothing to differentiate."""
    inputs: Sequence[Any]
    """Fake inputs, as the forward graph takes them."""
    tangents: Sequence[Any] = ()
    """Fake gradients that the backward graph takes; None for parts that it does not take."""
    fixed: tuple[int, ...] = ()
    """Inputs of the forward graph that stay where they are from call to call."""
    num_visible: int
    """The number of outputs of forward before those that are saved for backward."""
    num_saved: int = 0
    """The number of tensors that forward saves for backward."""
    copied: tuple[int, ...] = ()
    """The gradients, as backward's graph returns them, that get memory of their own afterwards."""
    saved_bytes: int = 0
    """The size of all saved tensors, with those that live on anyway."""

    @property
    def saved(self) -> list[Any]:
        """The outputs of forward that are saved for backward: tensors, then symbols."""
        return outputs_of(self.forward)[self.num_visible :]

    def freed_in(self, module: GraphModule) -> list[str]:
        """The inputs of a graph that nobody keeps: of backward's, what forward made for it."""
        if module is not self.backward:
            return []
        kept = {node.name for node in self.forward.graph.find_nodes(op="placeholder")}
        inputs = module.graph.find_nodes(op="placeholder")
        return [node.name for node in inputs if node.name not in kept]

    @property
    def free_dims(self) -> dict[int, tuple[int, ...]]:
        """For saved tensors, the dims whose sizes differ from call to call.

        Empty for a graph from the cache, whose nodes have no values: all of its sizes are fixed.
        """
        values = (node.meta.get("val") for node in self.saved[: self.num_saved])
        return {
            at: free
            for at, one in enumerate(values)
            if isinstance(one, Tensor) and (free := dynamo.free_dims(one))
        }

    @property
    def writes_late(self) -> bool:
        """Whether backward writes to an input that requires a gradient."""
        if self.backward is None:
            return False
        inputs = self.forward.graph.find_nodes(op="placeholder")
        differentiable = {
            inputs[at].name
            for one, place in zip(self.signature.inputs, places(self.wrappings.inputs), strict=True)
            for at in place
            if one.requires_grad
        }
        copies = self.backward.graph.find_nodes(
            op="call_function", target=torch.ops.aten.copy_.default
        )
        return any(node.args[0].name in differentiable for node in copies)

    def dependence(self, backward: Graph) -> tuple[frozenset[int], ...]:
        """For each gradient of the backward graph, the numbers of the tangents it depends on."""
        numbers = [
            number
            for number, place in enumerate(places(self.wrappings.tangents, symbols=False))
            for at in place
            if self.tangents[at] is not None
        ]
        inputs = backward.find_nodes(op="placeholder")
        taken = inputs[len(inputs) - len(numbers) :]
        found = {node: frozenset({one}) for node, one in zip(taken, numbers, strict=True)}
        for node in backward.nodes:
            if node not in found:
                found[node] = frozenset().union(*(found[one] for one in node.all_input_nodes))
        results: Any = backward.output_node().args[0]
        return tuple(
            frozenset().union(*(found.get(results[at], ()) for at in place))
            for place in places(self.wrappings.gradients)
        )

    def donated(self, backward: GraphModule) -> tuple[int, ...]:
        """The inputs of the backward graph that it may write over, when it runs for the last time.

        These are saved tensors that share memory with no input or output of forward, no gradient,
        and no other saved tensor.
        """
        forward_inputs = self.forward.graph.find_nodes(op="placeholder")
        seen = _memory_of([*forward_inputs, *outputs_of(self.forward)[: self.num_visible]])
        returned = _memory_of(outputs_of(backward))
        if seen is None or returned is None:
            return ()
        saved = {node.name: _memory(node) for node in self.saved if isinstance(node, Node)}
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


def outputs_of(module: GraphModule) -> list[Any]:
    """The values that a graph returns."""
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def count_saved(saved: Sequence[Any]) -> tuple[int, int]:
    """The number of tensors among saved values, and their bytes."""
    values = [one.meta.get("val") for one in saved if isinstance(one, Node)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return len(tensors), sum(map(symbols.num_bytes, tensors))


def overlapping_gradients(backward: GraphModule) -> tuple[int, ...]:
    """The gradients that share elements with an earlier gradient of the backward graph."""
    found: list[int] = []
    kept: dict[int, list[Node]] = {}
    for at, node in enumerate(outputs_of(backward)):
        value = node.meta.get("val") if isinstance(node, Node) else None
        if not isinstance(value, Tensor) or (key := storage.storage_key(value)) is None:
            continue
        earlier = kept.setdefault(key, [])
        # One tensor returned twice is copied by autograd itself.
        if node not in earlier and any(_overlap(one.meta["val"], value) for one in earlier):
            found.append(at)
        else:
            earlier.append(node)
    return tuple(found)


def _overlap(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors may share elements; with symbolic sizes, they may."""
    return bool(symbols.symbols_in(one) or symbols.symbols_in(two)) or may_overlap(one, two)


def _memory_of(nodes: Iterable[Any]) -> set[int | None] | None:
    """The storages of the tensors that some nodes give; None if one of them is unknown."""
    found = {
        _memory(node)
        for node in nodes
        if isinstance(node, Node) and isinstance(node.meta.get("val", node), (Tensor, Node))
    }
    return None if None in found else found


def _memory(node: Node) -> int | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or subclasses.wraps_others(value):
        return None
    return storage.storage_key(value)

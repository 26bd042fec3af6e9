"""The joint graph as the partitioners read it: which nodes can run where.

    side       runs in                      because
    FORWARD    forward, or in both          it was traced in forward, or is a size of what was
    BACKWARD   backward                     it depends on a tangent, or its order matters
    FLOATING   either, once                 cheap, traced in backward, of forward's values alone

Phases come from the trace (`node.meta["phase"]`; torch's own graphs have tags instead): an in-place
write that ran in backward must not move to forward, and dataflow alone does not show which it was.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx
from torch.utils import checkpoint

from shoal.compile.node_kinds import NodeKind, flat, is_tensor, kind, nodes_in
from shoal.errors import InvariantError

CheckpointPolicy = checkpoint.CheckpointPolicy

PINNED = frozenset({NodeKind.RANDOM, NodeKind.COLLECTIVE, NodeKind.EFFECT, NodeKind.MUTATION})
"""The kinds of nodes that stay in the phase where they were traced, since a move would show."""

TRACED_THERE = PINNED | {NodeKind.INPUT, NodeKind.EXPENSIVE}
"""What backward does itself. Much work of forward's values alone is a checkpoint's: it was asked
for there."""


class Side(Enum):
    """Where a node may run."""

    FORWARD = "forward"
    BACKWARD = "backward"
    FLOATING = "floating"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """One joint graph, read."""

    root: fx.GraphModule
    """The module that holds the graph's constants."""
    graph: fx.Graph
    nodes: tuple[fx.Node, ...]
    """All but the output, in order."""
    order: Mapping[fx.Node, int]
    kinds: Mapping[fx.Node, NodeKind]
    sides: Mapping[fx.Node, Side]
    forward_inputs: tuple[fx.Node, ...]
    backward_inputs: tuple[fx.Node, ...]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]
    written: frozenset[int] = frozenset()
    """The memory that does not keep its value: the graph, or its caller, writes to it."""
    handed_out: frozenset[int] = frozenset()
    """The memory of inputs that the caller sees in outputs, and may write to before backward."""

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Some of the nodes, in the order of the graph."""
        return sorted(nodes, key=self.order.__getitem__)


def wants_recompute(node: fx.Node) -> bool:
    """Whether a checkpoint asks to compute a node again rather than keep it."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def phase(node: fx.Node) -> str:
    """Where a node ran when it was traced: "forward" or "backward"."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return phase(node.args[0])  # a result belongs to what gave it
    if node.op == "placeholder" and "phase" not in node.meta:
        backward = node.name.startswith(("tangents", "bwd_"))
        return "backward" if backward else "forward"
    if node.op == "get_attr":
        return node.meta.get("phase", "forward")
    found = node.meta.get("phase")
    if found not in ("forward", "backward"):
        raise InvariantError(
            f'expected node.meta["phase"] of {node.name} ({node.target}) to be "forward" or '
            f'"backward", got {found!r}: whoever adds a node to a joint graph must say where it ran'
        )
    return found


def is_size_of_tensor(node: fx.Node, kind: NodeKind) -> bool:
    """Whether a node asks a tensor for its shape: the answer is kept, and not the tensor."""
    return kind is NodeKind.SIZE and any(is_tensor(one) for one in node.all_input_nodes)


def read_joint(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    *,
    graph: fx.Graph | None = None,
    written: frozenset[int] = frozenset(),
    handed_out: frozenset[int] = frozenset(),
) -> Joint:
    """Read a module's joint graph, or one made of it: outputs of a function, then gradients."""
    graph = module.graph if graph is None else graph
    outputs = tuple(flat(graph.output_node().args))
    if not 0 <= num_fwd_outputs <= len(outputs):
        raise ValueError(
            f"expected num_fwd_outputs between 0 and the {len(outputs)} outputs of the joint "
            f"graph, got {num_fwd_outputs}"
        )
    nodes = tuple(node for node in graph.nodes if node.op != "output")
    kinds = {node: kind(node) for node in nodes}
    sides = _sides(nodes, kinds)
    inputs = [node for node in nodes if node.op == "placeholder"]
    for one in nodes_in(outputs[:num_fwd_outputs]):
        if sides[one] is Side.BACKWARD:
            raise InvariantError(
                f"forward's output {one.name} depends on backward: the first {num_fwd_outputs} "
                "outputs of a joint graph must be the function's own"
            )
    return Joint(
        root=module,
        graph=graph,
        nodes=nodes,
        order={node: place for place, node in enumerate(nodes)},
        kinds=kinds,
        sides=sides,
        forward_inputs=tuple(one for one in inputs if sides[one] is Side.FORWARD),
        backward_inputs=tuple(one for one in inputs if sides[one] is Side.BACKWARD),
        forward_outputs=outputs[:num_fwd_outputs],
        backward_outputs=outputs[num_fwd_outputs:],
        written=written,
        handed_out=handed_out,
    )


def _sides(nodes: Iterable[fx.Node], kinds: Mapping[fx.Node, NodeKind]) -> dict[fx.Node, Side]:
    sides: dict[fx.Node, Side] = {}
    for node in nodes:
        needs_backward = any(sides[one] is Side.BACKWARD for one in node.all_input_nodes)
        if phase(node) == "forward":
            if needs_backward:
                raise InvariantError(
                    f"{node.name} was traced in forward and depends on backward: "
                    f"{[one.name for one in node.all_input_nodes]}"
                )
            sides[node] = Side.FORWARD
        elif needs_backward or kinds[node] in TRACED_THERE:
            sides[node] = Side.BACKWARD
        elif is_size_of_tensor(node, kinds[node]):
            sides[node] = Side.FORWARD
        else:
            sides[node] = Side.FLOATING
    return sides

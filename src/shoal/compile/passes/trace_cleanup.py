"""Clean up a joint graph right after its trace.

A trace leaves nodes that only tracing needed: other names of a tensor, values that nobody reads,
sizes taken from a gradient though forward needs them.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, fx

from shoal._torch import operators
from shoal.compile.aot.random_state import drop_unread_states

_ASK = torch.ops.aten.sym_size.int
_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_SCATTER = torch.ops.aten.as_strided_scatter.default


def rebind_sizes(graph: fx.Graph) -> None:
    """Let forward take data-dependent sizes from forward's values.

    A trace takes a symbolic size from the first value that has it. Gradients are inputs of a joint
    graph, so that the size of an output, if it depends on data, may be taken from its gradient,
    which comes only after forward.
    """
    inputs = graph.find_nodes(op="placeholder")
    tangents = {node for node in inputs if node.meta["phase"] == "backward"}
    asked = [
        node
        for node in graph.find_nodes(op="call_function", target=_ASK)
        if node.args[0] in tangents and node.meta["phase"] == "forward"
    ]
    for node in asked:
        source, dim = _origin(graph, node, tangents)
        with graph.inserting_after(source):
            size = graph.call_function(_ASK, (source, dim))
        size.meta = dict(node.meta)
        node.replace_all_uses_with(size)
        graph.erase_node(node)


def _origin(graph: fx.Graph, asked: fx.Node, tangents: Collection[fx.Node]) -> tuple[fx.Node, int]:
    """The first value of forward that has a size, if that is before anybody wants it."""
    wanted = str(asked.meta["val"])
    users = set(asked.users)
    for node in graph.nodes:
        if node in users:
            break
        value = node.meta.get("val")
        if node in tangents or node.meta.get("phase") != "forward" or not isinstance(value, Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, torch.SymInt) and str(size) == wanted:
                return node, dim
    raise NotImplementedError(
        f"a size that depends on data ({wanted}) is needed in forward before a tensor of that size "
        "is there; this is not supported"
    )


def drop_aliases(graph: fx.Graph) -> None:
    """Read the tensor instead of another name of it (`detach`, `alias`), unless that is returned.

    A graph that writes nothing but inputs has no use for other names.
    """
    returned = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if node.target in _ALIASES and node not in returned:
            node.replace_all_uses_with(node.args[0])


def detach_scattered(graph: fx.Graph) -> None:
    """Give `as_strided_scatter` a detached input where the input requires a gradient.

    The operator refuses tensors that require one and are not contiguous, though nobody
    differentiates it here.
    """
    for primal in graph.find_nodes(op="placeholder"):
        scatters = [u for u in primal.users if u.target is _SCATTER and u.args[0] is primal]
        if not scatters or not primal.meta.get("requires_grad"):
            continue
        with graph.inserting_after(primal):
            detached = graph.call_function(torch.ops.aten.detach.default, (primal,))
        detached.meta.update(val=primal.meta["val"].detach(), phase="forward")
        for user in scatters:
            user.replace_input_with(primal, detached)


def drop_dead_nodes(graph: fx.Graph) -> None:
    """Erase nodes that nobody reads, and random states that nobody goes back to.

    A node that draws random numbers moves the generator, and stays.
    """
    drop_unread_states(graph)
    graph.eliminate_dead_code(operators.is_impure)


def tag_for_torch(graph: fx.Graph) -> None:
    """Write torch's `partitioner_tag` on each node, which its partitions and passes read."""
    for node in graph.nodes:
        if node.op != "output":
            node.meta.setdefault("partitioner_tag", f"is_{node.meta['phase']}")

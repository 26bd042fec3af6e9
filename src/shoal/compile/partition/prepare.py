"""Passes that make a joint graph ready to be cut: phases, checkpoint tags, equal work once."""

from __future__ import annotations

from typing import Any

from torch import fx

from shoal.compile.node_kinds import NodeKind, is_wait, kind
from shoal.compile.partition.joint import PINNED, CheckpointPolicy, phase, wants_recompute
from shoal.compile.partition.mutation import storages


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph whose nodes and metadata can be changed without changing the first's."""
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copied.node_copy(node, copies.__getitem__)
    return copied


PHASES = {
    f"{prefix}_{phase}": phase
    for prefix in ("is", "must_be_in")
    for phase in ("forward", "backward")
}
"""By torch's tags, `node.meta["partitioner_tag"]`."""


def complete_phases(graph: fx.Graph) -> None:
    """Give a graph phases if it has none: by torch's tags, or by what its values depend on.

    Dataflow does not tell where a write ran: one without a tag is left without a phase, and
    `phase` refuses it. A node that depends on no gradient counts as forward's.
    """
    if not any("phase" in node.meta for node in _calls(graph)):
        infer_phases(graph)


def infer_phases(graph: fx.Graph) -> None:
    """Give phases to those nodes of a graph that have none."""
    for node in _calls(graph):
        if "phase" in node.meta:
            continue
        found = PHASES.get(node.meta.get("partitioner_tag", ""))
        if found is None and kind(node) is not NodeKind.MUTATION:
            reads_backward = any(phase(one) == "backward" for one in node.all_input_nodes)
            found = "backward" if reads_backward else "forward"
        if found is not None:
            node.meta["phase"] = found


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def complete_tags(graph: fx.Graph) -> None:
    """Give results, pending collectives and the borders of regions the tags that they need."""
    for node in graph.nodes:
        if node.op == "call_function" and kind(node) is NodeKind.ITEM:
            _inherit(node)
    for node in graph.nodes:
        if is_wait(node):
            _join_collective(node)
    for node in graph.nodes:
        if _ends_region(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _inherit(item: fx.Node) -> None:
    """One of several results is computed again if they are, and kept if it or they should be."""
    producer = item.args[0]
    assert isinstance(producer, fx.Node)
    if item.meta.get("recompute") in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
        return
    for key in ("recompute", "ac_graph_id"):
        item.meta.pop(key, None)
        if key in producer.meta:
            item.meta[key] = producer.meta[key]


def _join_collective(wait: fx.Node) -> None:
    """A collective and its wait are computed again together, or not at all."""
    together = [wait, wait.all_input_nodes[0]]
    while kind(together[-1]) is NodeKind.ITEM:
        together.append(together[-1].all_input_nodes[0])
    if kind(together[-1]) is NodeKind.COLLECTIVE and any(map(wants_recompute, together)):
        for node in together:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _ends_region(node: fx.Node) -> bool:
    """Whether a checkpointed region hands a value to the next, which starts from it."""
    region = node.meta.get("ac_graph_id")
    return (
        region is not None
        and wants_recompute(node)
        and any(
            wants_recompute(user) and user.meta.get("ac_graph_id", region) > region
            for user in node.users
        )
    )


UNTOUCHED = PINNED | {NodeKind.INPUT, NodeKind.CONSTANT}


def drop_repeated(graph: fx.Graph) -> None:
    """Let readers of equal values read the first of them.

    Forward and backward stay apart: what backward computes again, it was asked to. What is
    returned stays apart too: two results must not become one tensor.
    """
    returned = storages(graph.output_node().all_input_nodes)
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or kind(node) in UNTOUCHED or node.is_impure():
            continue
        if storages([node]) & returned:
            continue
        tags = (node.meta.get("recompute"), node.meta.get("ac_graph_id"))
        key = (phase(node), node.target, tags, _frozen(node.args), _frozen(dict(node.kwargs)))
        try:
            known = first.setdefault(key, node)
        except TypeError:  # an argument without a hash: nobody can tell whether others equal it
            continue
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _frozen(given: Any) -> Any:
    if isinstance(given, list | tuple):
        return (type(given).__name__, *map(_frozen, given))
    if isinstance(given, dict):
        return tuple((name, _frozen(one)) for name, one in sorted(given.items()))
    if isinstance(given, slice):
        return ("slice", *map(_frozen, (given.start, given.stop, given.step)))
    return (type(given), repr(given) if isinstance(given, float) else given)

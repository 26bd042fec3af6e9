"""Checkpoint tags, completed so that every node can be judged by its own."""

from __future__ import annotations

from torch import fx

from shoal.compile.partition.joint import CheckpointPolicy, wants_recompute
from shoal.compile.partition.ops import Kind, is_wait, kind


def complete_tags(graph: fx.Graph) -> None:
    """Give results, pending collectives and the borders of regions the tags that they need."""
    for node in graph.nodes:
        if node.op == "call_function" and kind(node) is Kind.ITEM:
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
    while kind(together[-1]) is Kind.ITEM:
        together.append(together[-1].all_input_nodes[0])
    if kind(together[-1]) is Kind.COLLECTIVE and any(map(wants_recompute, together)):
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

"""Buckets of collectives written into a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from shoal.compile.passes.bucket import Bucket, Limits, Member, decide_buckets
from shoal.compile.passes.dependencies import Dependencies
from shoal.compile.passes.order import bring_together, put_in_order

Rewrite = Callable[[fx.Graph, Bucket], Sequence[fx.Node]]
"""Writes the collective of a bucket into a graph, and gives the new result for each old wait."""


def fuse(
    graph: fx.Graph, members: Sequence[Member], limits: Limits, rewrite: Rewrite
) -> list[Bucket]:
    """Make one collective of each bucket; return the buckets, with those that stay as they are."""
    dependencies = Dependencies(graph)
    buckets = decide_buckets(dependencies, members, limits)
    several = [bucket for bucket in buckets if len(bucket) > 1]
    if several:
        put_in_order(graph, bring_together(dependencies, _groups(several)))
    for bucket in several:
        _replace(graph, bucket, rewrite(graph, bucket))
    graph.lint()
    return buckets


def _groups(buckets: Sequence[Bucket]) -> list[tuple[fx.Node, ...]]:
    """The nodes that must stand side by side: what starts together, and what ends together."""
    starts = [tuple(node for member in one for node in member.departure) for one in buckets]
    ends = [tuple(node for member in one for node in member.arrival) for one in buckets]
    return starts + ends


def departure(bucket: Bucket) -> fx.Node:
    """Before which node a bucket's new collective goes."""
    return _first_of([node for member in bucket for node in member.departure])


def arrival(bucket: Bucket) -> fx.Node:
    """Before which node a bucket's new results go."""
    return _first_of([node for member in bucket for node in member.arrival])


def _first_of(nodes: Sequence[fx.Node]) -> fx.Node:
    """The first of some nodes that stand side by side."""
    group, node = set(nodes), nodes[0]
    while node.prev in group:
        node = node.prev
    return node


def _replace(graph: fx.Graph, bucket: Bucket, results: Sequence[fx.Node]) -> None:
    """Let new results take the place of the waits of a bucket, and drop what they replace."""
    waits = [wait for member in bucket for wait in member.block.wait_nodes]
    for wait, result in zip(waits, results, strict=True):
        wait.replace_all_uses_with(result)
    for member in bucket:
        for node in reversed((*member.departure, *member.arrival)):
            graph.erase_node(node)

"""Buckets of collectives written into a graph: one collective, as one row or as one launch.

    a ─┐              ┌─► a of all ranks      as a row: copied into one tensor before, and cut after
    b ─┴─► one launch ┴─► b of all ranks      as one launch: nothing is copied; NCCL carries the
                                              tensors of a launch side by side

gloo carries the tensors of a launch one after the other, so that on CPU a row is cheaper.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from shoal.comm.buckets import Limits
from shoal.compile.passes.bucket import Bucket, Member, decide_buckets
from shoal.compile.passes.collectives import variant
from shoal.compile.passes.dependencies import Dependencies, bring_together, put_in_order
from shoal.compile.passes.rewrite import call_again, call_function

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


def as_launch_or_row(name: str, in_one_row: Rewrite, *, together: bool | None) -> Rewrite:
    """How a bucket becomes one: by the coalesced operator of a name, or in another way.

    By the device if that is not said.
    """

    def rewrite(graph: fx.Graph, bucket: Bucket) -> list[fx.Node]:
        device = bucket[0].block.key.device
        on_cuda = device is not None and device.type == "cuda"
        if on_cuda if together is None else together:
            sources = [node for member in bucket for node in member.sources]
            op = variant(bucket[-1].block.comm_node, name)
            return launch_together(graph, bucket, op, sources)
        return list(in_one_row(graph, bucket))

    return rewrite


def launch_together(
    graph: fx.Graph, bucket: Bucket, op: Callable[..., Any], given: list[fx.Node] | fx.Node
) -> list[fx.Node]:
    """Write one call of an operator that takes a list; give the new result for each old one."""
    last = bucket[-1].block
    num_results = sum(len(member.block.wait_nodes) for member in bucket)
    with graph.inserting_before(departure(bucket)):
        comm = call_again(graph, last.comm_node, given, op)
    with graph.inserting_before(arrival(bucket)):
        items = [call_function(graph, operator.getitem, (comm, i)) for i in range(num_results)]
        return [call_again(graph, last.wait_nodes[-1], item) for item in items]

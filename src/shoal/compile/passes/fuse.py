"""Buckets of collectives written into a graph: one collective, as one row or as one launch.

    a ─┐              ┌─► a of all ranks      as a row: copied into one tensor before, and cut after
    b ─┴─► one launch ┴─► b of all ranks      as one launch: nothing is copied; NCCL carries the
                                              tensors of a launch side by side

gloo carries the tensors of a launch one after the other, so that on CPU a row is cheaper.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import fx

from shoal.comm.buckets import Limits
from shoal.compile.passes.bucket import BucketMember, CommBucket, decide_buckets
from shoal.compile.passes.collectives import variant
from shoal.compile.passes.dependencies import Dependencies, bring_together, put_in_order
from shoal.compile.passes.rewrite import call_again, call_function

Rewrite = Callable[[fx.Graph, CommBucket], Sequence[fx.Node]]
"""Writes the collective of a bucket into a graph, and gives the new result for each old wait."""


def fuse(
    graph: fx.Graph, members: Sequence[BucketMember], limits: Limits, rewrite: Rewrite
) -> list[CommBucket]:
    """Make one collective of each bucket; return the buckets, with those that stay as they are."""
    dependencies = Dependencies(graph)
    buckets = decide_buckets(dependencies, members, limits)
    several = [bucket for bucket in buckets if len(bucket) > 1]
    if several:
        starts = [bucket.departure for bucket in several]
        ends = [bucket.arrival for bucket in several]
        put_in_order(graph, bring_together(dependencies, starts + ends))
    for bucket in several:
        _replace(graph, bucket, rewrite(graph, bucket))
    graph.lint()
    return buckets


def first_of(nodes: Sequence[fx.Node]) -> fx.Node:
    """The first of some nodes that stand side by side."""
    group, node = set(nodes), nodes[0]
    while node.prev in group:
        node = node.prev
    return node


def _replace(graph: fx.Graph, bucket: CommBucket, results: Sequence[fx.Node]) -> None:
    """Let new results take the place of the waits of a bucket, and drop what they replace."""
    for wait, result in zip(bucket.waits, results, strict=True):
        wait.replace_all_uses_with(result)
    for node in reversed((*bucket.departure, *bucket.arrival)):
        graph.erase_node(node)


def send(graph: fx.Graph, bucket: CommBucket, given: list[fx.Node] | fx.Node, name: str) -> fx.Node:
    """Write one collective of a name in the place of a bucket's."""
    last = bucket.last.comm_node
    return call_again(graph, last, given, variant(last, name))


def wait_for(graph: fx.Graph, bucket: CommBucket, sent: fx.Node) -> fx.Node:
    """Write the wait for one result of a bucket's new collective."""
    return call_again(graph, bucket.waits[-1], sent)


def launch_together(
    graph: fx.Graph, bucket: CommBucket, given: list[fx.Node] | fx.Node, name: str
) -> list[fx.Node]:
    """Write one call of an operator that takes a list; give the new result for each old one."""
    with graph.inserting_before(first_of(bucket.departure)):
        sent = send(graph, bucket, given, name)
    with graph.inserting_before(first_of(bucket.arrival)):
        items = [
            call_function(graph, operator.getitem, (sent, i)) for i in range(len(bucket.waits))
        ]
        return [wait_for(graph, bucket, item) for item in items]

"""Several collectives launched as one, each with its own tensors.

    a ─┐              ┌─► a of all ranks      nothing is copied before or after: NCCL
    b ─┴─► one launch ┴─► b of all ranks      carries tensors of a launch side by side

gloo carries them one after the other, so that on CPU it is cheaper to copy them into one row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from shoal.compile.passes.bucket import Bucket
from shoal.compile.passes.collectives import variant
from shoal.compile.passes.fuse import Rewrite, arrival, departure
from shoal.compile.passes.rewrite import call_again, call_function


def together_or(name: str, in_one_row: Rewrite, *, together: bool | None) -> Rewrite:
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

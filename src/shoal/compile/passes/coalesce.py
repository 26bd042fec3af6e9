"""Several collectives launched as one, each with its own tensors.

    a ─┐              ┌─► a of all ranks      nothing is copied before or after: NCCL
    b ─┴─► one launch ┴─► b of all ranks      carries tensors of a launch side by side

gloo carries them one after the other, so that on CPU it is cheaper to copy them into one row.
"""

from __future__ import annotations

import operator

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
            return _launch_together(graph, bucket, name)
        return list(in_one_row(graph, bucket))

    return rewrite


def _launch_together(graph: fx.Graph, bucket: Bucket, name: str) -> list[fx.Node]:
    sources = [node for member in bucket for node in member.sources]
    last = bucket[-1].block
    with graph.inserting_before(departure(bucket)):
        comm = call_again(graph, last.comm_node, sources, variant(last.comm_node, name))
    with graph.inserting_before(arrival(bucket)):
        results = [
            call_function(graph, operator.getitem, (comm, place)) for place in range(len(sources))
        ]
        return [call_again(graph, last.wait_nodes[0], result) for result in results]

"""The gradient all-reduces of DDP, made few and late: torch's `ddp_fusion`, by its names.

What DDP's reducer leaves in a graph is one row per gradient:

    gradient ─► div ─► all_reduce ─► wait ─► output, or copy_ into .grad

Where nobody has cleaned up yet, a copy that writes over the gradient stands behind the wait.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from shoal._torch import dynamo
from shoal.comm.buckets import Limits
from shoal.comm.collectives import Kind as CommKind
from shoal.compile.node_kinds import is_wait, op_name, value
from shoal.compile.passes.bucket import BucketMember
from shoal.compile.passes.bucket_all_reduce import (
    match_all_reduces,
    rewrite_as_list,
    rewrite_as_row,
    scaling,
)
from shoal.compile.passes.comm_block import is_view
from shoal.compile.passes.fuse import Rewrite, fuse
from shoal.compile.passes.schedule import delay_waits
from shoal.errors import UsageError

CONVERSIONS = frozenset({"aten::_to_copy", "prims::convert_element_type"})
COPY = torch.ops.aten.copy_.default
COPY_OF = torch.ops.aten.copy.default


def fuse_ddp_with_concat_op(graph: fx.Graph, bucket_size_mb: float) -> None:
    """Reduce gradients in rows: flatten, join, divide, reduce, split, reshape."""
    _fuse(graph, bucket_size_mb, rewrite_as_row)


def fuse_ddp_with_coalesced_op(graph: fx.Graph, bucket_size_mb: float) -> None:
    """Reduce gradients in lists, by the collective that takes several tensors."""
    _fuse(graph, bucket_size_mb, rewrite_as_list)


def schedule_comm_wait(graph: fx.Graph) -> None:
    """Wait for each all-reduce right before the first node that uses its result."""
    delay_waits(graph, kinds=(CommKind.ALL_REDUCE,))


def fuse_ddp_communication(
    graph: fx.Graph, passes: Sequence[Callable[..., None] | str], bucket_size_mb: float
) -> None:
    """Run passes over a graph, given by name or as functions of the graph.

    A function that has a parameter `bucket_size_mb` gets the size.
    """
    for run in [_pass(one) for one in passes]:
        if "bucket_size_mb" in inspect.signature(run).parameters:
            run(graph, bucket_size_mb=bucket_size_mb)
        else:
            run(graph)
        graph.lint()


def _pass(given: Callable[..., None] | str) -> Callable[..., None]:
    if callable(given):
        return given
    known = {
        one.__name__: one
        for one in (fuse_ddp_with_concat_op, fuse_ddp_with_coalesced_op, schedule_comm_wait)
    }
    if given not in known:
        raise UsageError(
            f"expected a function or one of {', '.join(sorted(known))}, got {given!r} as a pass"
        )
    return known[given]


def _fuse(graph: fx.Graph, bucket_size_mb: float, rewrite: Rewrite) -> None:
    drop_copies(graph)
    buckets = fuse(graph, match_gradients(graph), Limits.of_ddp(bucket_size_mb), rewrite)
    if buckets:
        dynamo.report_ddp_buckets(len(buckets))


def drop_copies(graph: fx.Graph) -> None:
    """Use the results of waits instead of copies of them that nothing tells apart."""
    for node in list(graph.nodes):
        if node.target is not COPY_OF:
            continue
        shape, source = node.args[:2]
        fresh = isinstance(source, fx.Node) and is_wait(source) and len(source.users) == 1
        if fresh and isinstance(shape, fx.Node) and _alike(value(shape), value(source)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _alike(one: Tensor, other: Tensor) -> bool:
    kinds = [(it.dtype, it.device, it.shape, it.stride()) for it in (one, other)]
    return kinds[0] == kinds[1]


def match_gradients(graph: fx.Graph) -> list[BucketMember]:
    """The all-reduces that DDP's reducer put into a graph."""
    return [member for member in match_all_reduces(graph) if _is_gradient(member)]


def _is_gradient(member: BucketMember) -> bool:
    """Whether results are averages over ranks that nothing reads but what keeps gradients."""
    block = member.block
    chains = [_to_the_end(wait) for wait in block.wait_nodes]
    if any(chain is None for chain in chains):
        return False
    before = all(scaling(node) is not None for node in block.inputs)
    after = all(any(map(scaling, chain or ())) for chain in chains)
    return before or after or block.key.reduce_op == "avg"


def _to_the_end(wait: fx.Node) -> list[fx.Node] | None:
    """The nodes from a wait to what keeps the gradient; None if it goes elsewhere."""
    chain = [wait]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if user.op == "output" or user.target is COPY:
            return chain
        # A result may be waited for again where it leaves a function.
        copied = user.target is COPY_OF and user.args[1] is chain[-1]
        passes_on = copied or is_view(user) or is_wait(user) or op_name(user) in CONVERSIONS
        if not passes_on and scaling(user) is None:
            return None
        chain.append(user)
    return None

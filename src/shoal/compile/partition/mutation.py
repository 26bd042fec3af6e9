"""Copy the old values of inputs that forward writes to, where backward reads them.

In a functional graph an input means the value it came in with. Forward's last nodes, or the
caller, write the new value over it, so backward would read that instead. Where backward reads
such an input, or a view of it, forward copies the old value first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet

import torch
from torch import fx

from shoal._torch import operators, storage
from shoal.compile.node_kinds import (
    NodeKind,
    flat,
    is_tensor,
    kind,
    mutated_inputs,
    op_name,
    tensors_of,
    value,
)
from shoal.compile.partition.joint import CheckpointPolicy, phase

RUNNING_STATISTICS = frozenset({"running_mean", "running_var"})
BATCH_NORMS = frozenset(
    f"aten::{library}batch_norm_backward" for library in ("", "native_", "cudnn_", "miopen_")
)


def written_in(graph: fx.Graph, where: str) -> set[int]:
    """The memory that nodes of one phase write to."""
    nodes = (node for node in graph.nodes if node.op == "call_function" and phase(node) == where)
    return storages(written for node in nodes for written in mutated_inputs(node))


def storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The memory in which the values of some nodes lie."""
    keys = map(storage.storage_key, tensors_of(nodes))
    return {key for key in keys if key is not None}


def reads_any(node: fx.Node, memory: AbstractSet[int]) -> bool:
    """Whether a node looks at the elements of some memory."""
    return not memory.isdisjoint(storages(node.all_input_nodes))


def written_before_backward(graph: fx.Graph, mutated_inputs: Collection[int]) -> set[int]:
    """The memory that forward writes to, and that of inputs which the caller writes to after it.

    `mutated_inputs` are places of such inputs, besides those whose nodes say so:
    `node.meta["written"]`.
    """
    inputs = graph.find_nodes(op="placeholder")
    outside = {i for i, node in enumerate(inputs) if node.meta.get("written")} | {*mutated_inputs}
    return written_in(graph, "forward") | storages(inputs[i] for i in outside)


def protect_old_values(
    graph: fx.Graph, num_fwd_outputs: int, mutated_inputs: Collection[int] = ()
) -> None:
    """Let backward read copies of what is written over before it runs."""
    written = written_before_backward(graph, mutated_inputs)
    if not written:
        return
    for node in list(graph.nodes):
        if node.op == "call_function" and phase(node) == "backward":
            _drop_running_statistics(node)
    for node in list(graph.nodes):
        if (
            node.op != "output"
            and phase(node) == "forward"
            and is_tensor(node)
            and not written.isdisjoint(storages([node]))
            and kind(node) is not NodeKind.MUTATION
        ):
            _copy_for_backward(graph, node, num_fwd_outputs)


def _copy_for_backward(graph: fx.Graph, node: fx.Node, num_fwd_outputs: int) -> None:
    readers = [user for user in node.users if _reads_in_backward(user, node)]
    output = graph.output_node()
    outputs = list(flat(output.args))
    if not readers and node not in outputs[num_fwd_outputs:]:
        return
    place = node.next
    while place.op == "placeholder":
        place = place.next
    with graph.inserting_before(place):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = {
        **{key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta},
        "val": value(node).clone(),
        "phase": "forward",
        "recompute": CheckpointPolicy.MUST_SAVE,
    }
    for reader in readers:
        reader.replace_input_with(node, copy)
    gradients = [copy if one is node else one for one in outputs[num_fwd_outputs:]]
    output.args = ((*outputs[:num_fwd_outputs], *gradients),)


def _reads_in_backward(user: fx.Node, node: fx.Node) -> bool:
    return (
        user.op == "call_function"
        and phase(user) == "backward"
        and kind(user) is not NodeKind.SIZE
        and node not in mutated_inputs(user)
    )


def _drop_running_statistics(node: fx.Node) -> None:
    """Batch norm takes its running statistics in backward, and reads none of them in training."""
    if op_name(node) not in BATCH_NORMS:
        return
    declared = operators.schema_arguments(node)
    given = {argument.name: place for place, (argument, _) in enumerate(declared)}
    mode = given.get("train", given.get("update"))
    if mode is not None and node.args[mode] is not True:
        return
    for name in RUNNING_STATISTICS & given.keys():
        node.update_arg(given[name], None)

"""A joint graph made ready to be cut: a copy, completed."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from shoal.compile.partition.dedupe import drop_repeated
from shoal.compile.partition.joint import Joint, read_joint
from shoal.compile.partition.mutation import protect_old_values, storages, written_in
from shoal.compile.partition.phases import complete_phases
from shoal.compile.partition.tags import complete_tags


def prepare(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    *,
    mutated_inputs: Collection[int] = (),
    dedupe: bool,
) -> Joint:
    """Copy a joint graph, complete its tags and phases, keep old values apart, and read it.

    `mutated_inputs` are the places of inputs that the caller writes to after forward, besides those
    whose nodes say so: `node.meta["written"]`.
    """
    graph = copy_graph(module.graph)
    complete_phases(graph)
    complete_tags(graph)
    inputs = graph.find_nodes(op="placeholder")
    outside = {i for i, node in enumerate(inputs) if node.meta.get("written")} | {*mutated_inputs}
    before_backward = written_in(graph, "forward") | storages(inputs[i] for i in outside)
    protect_old_values(graph, num_fwd_outputs, before_backward)
    if dedupe:
        drop_repeated(graph)
    written = frozenset(before_backward | written_in(graph, "backward"))
    shown = frozenset(storages(node for node in inputs if node.meta.get("handed_out")))
    return read_joint(module, num_fwd_outputs, graph=graph, written=written, handed_out=shown)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph whose nodes and metadata can be changed without changing the first's."""
    copied = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = copied.node_copy(node, copies.__getitem__)
    return copied

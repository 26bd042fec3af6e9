"""Where the nodes of a joint graph ran that another tracer than ours has made."""

from __future__ import annotations

from torch import fx

from shoal.compile.partition.joint import phase
from shoal.compile.partition.ops import Kind, kind

PHASES = {
    "is_forward": "forward",
    "must_be_in_forward": "forward",
    "is_backward": "backward",
    "must_be_in_backward": "backward",
}
"""By torch's tags, `node.meta["partitioner_tag"]`."""


def complete_phases(graph: fx.Graph) -> None:
    """Give a graph phases if it has none: by torch's tags, or by what its values depend on.

    Dataflow does not tell where a write ran: one without a tag is left without a phase, which is
    refused by whoever asks for it. What depends on no gradient counts as forward's.
    """
    if not any("phase" in node.meta for node in _calls(graph)):
        infer_phases(graph)


def infer_phases(graph: fx.Graph) -> None:
    """Give phases to those nodes of a graph that have none."""
    for node in _calls(graph):
        if "phase" in node.meta:
            continue
        found = PHASES.get(node.meta.get("partitioner_tag", ""))
        if found is None and kind(node) is not Kind.MUTATION:
            reads_backward = any(phase(one) == "backward" for one in node.all_input_nodes)
            found = "backward" if reads_backward else "forward"
        if found is not None:
            node.meta["phase"] = found


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]

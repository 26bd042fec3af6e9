"""The partitioners: by minimum cut or as traced, and under functorch's names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from shoal._torch import settings
from shoal.compile.node_kinds import closure, nodes_in
from shoal.compile.observe.observation import tell_passes
from shoal.compile.partition.bans import find_firm_bans
from shoal.compile.partition.joint import Joint, Side, read_joint
from shoal.compile.partition.mutation import storages, written_before_backward, written_in
from shoal.compile.partition.prepare import copy_graph
from shoal.compile.partition.saved_values import (
    as_last_views,
    is_keepable,
    keep_within,
    without_outputs,
)
from shoal.compile.partition.split import split
from shoal.compile.passes import pipeline


def default_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    static_lifetime_input_nodes: Collection[fx.Node] | None = None,
    mutated_inputs: Collection[int] = (),
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward graphs, each node where it was traced.

    Only nodes that a checkpoint tags are computed again. `mutated_inputs` are the places of inputs
    that are written to outside, after forward. What lives on anyway is kept like everything else:
    the `static` arguments change nothing.
    """
    joint = _prepare(joint_module, num_fwd_outputs, mutated_inputs, dedupe=False)
    return split(joint, _read_across(joint))


def min_cut_rematerialization_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: Any,
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    memory_budget: float = 1.0,
    mutated_inputs: Collection[int] = (),
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward graphs that keep as few bytes as can be, with cheap work done again.

    A budget below 1 does more work again to keep less. The budget that is set for torch's own
    runtime (`activation_memory_budget`) holds too. `static_lifetime_input_indices` are the places
    of inputs that are free to keep, `mutated_inputs` of those that are written to outside, after
    forward. `compiler` changes nothing.
    """
    joint = _prepare(joint_module, num_fwd_outputs, mutated_inputs, dedupe=True)
    places = set(static_lifetime_input_indices or ())
    static = {node for i, node in enumerate(joint.forward_inputs) if i in places}
    budgets = {
        "memory_budget": memory_budget,
        "activation_memory_budget": settings.memory_budget(),
    }
    for name, budget in budgets.items():  # their minimum would hide one that is too large
        if not 0 <= budget <= 1:
            raise ValueError(f"expected a memory budget between 0 and 1, got {name}={budget}")
    kept = without_outputs(joint, keep_within(joint, min(budgets.values()), static=static))
    return split(joint, as_last_views(joint, kept))


def _prepare(
    module: fx.GraphModule, num_fwd_outputs: int, mutated_inputs: Collection[int], *, dedupe: bool
) -> Joint:
    """Copy a joint graph, run the passes before the cut over the copy, and read it."""
    graph = copy_graph(module.graph)
    passes = pipeline.before_cut(
        num_fwd_outputs=num_fwd_outputs, mutated_inputs=mutated_inputs, dedupe=dedupe
    )
    tell_passes("before_cut", passes.run(graph))
    inputs = graph.find_nodes(op="placeholder")
    return read_joint(
        module,
        num_fwd_outputs,
        graph=graph,
        written=frozenset(
            written_before_backward(graph, mutated_inputs) | written_in(graph, "backward")
        ),
        handed_out=frozenset(storages(node for node in inputs if node.meta.get("handed_out"))),
    )


def _read_across(joint: Joint) -> list[fx.Node]:
    """The values of forward that backward reads, or needs to compute what is tagged again."""
    firm = find_firm_bans(joint)

    def is_kept(node: fx.Node) -> bool:
        return joint.sides[node] is Side.FORWARD and is_keepable(joint, node, firm)

    roots = nodes_in(joint.backward_outputs)
    roots += [node for node in joint.nodes if joint.sides[node] is not Side.FORWARD]
    read = closure(roots, lambda node: () if is_kept(node) else node.all_input_nodes)
    return [node for node in read if is_kept(node)]

"""What forward keeps for backward, by a minimum cut through a joint graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from shoal.compile.partition.bans import Ban
from shoal.compile.partition.cost import SYMBOL_BYTES, kept_bytes
from shoal.compile.partition.fusion import is_materialized
from shoal.compile.partition.joint import Joint, Side, wants_recompute
from shoal.compile.partition.min_cut import CutNode, cheapest_kept
from shoal.compile.partition.ops import Kind, is_symbolic, is_tensor, is_wait, value

FARTHEST = 100
"""A value this many nodes away from backward weighs twice what it takes: chains stay short."""


def keep(
    joint: Joint, bans: Mapping[fx.Node, Ban], *, static: Collection[fx.Node] = ()
) -> list[fx.Node]:
    """The values to keep: as few bytes as can be where the banned nodes are not computed again.

    `static` are inputs that live on anyway, such as parameters: keeping them is free.
    """
    needed = {one for one in joint.backward_outputs if isinstance(one, fx.Node)}
    distances = _distances(joint)
    nodes = [
        CutNode(
            name=node.name,
            cost=0 if node in static else _cost(joint, node, distances[node], bans),
            reads=tuple(joint.order[one] for one in node.all_input_nodes),
            only_forward=node in bans,
            only_backward=joint.sides[node] is Side.BACKWARD,
            needed=node in needed,
        )
        for node in joint.nodes
    ]
    return [joint.nodes[place] for place in cheapest_kept(nodes)]


def is_keepable(joint: Joint, node: fx.Node, bans: Mapping[fx.Node, Ban]) -> bool:
    """Whether a value can cross from forward to backward, and is not tagged to be made again."""
    held = value(node)
    if joint.kinds[node] is Kind.CONSTANT or held is None or isinstance(held, list | tuple | dict):
        return False
    if joint.kinds[node] is Kind.COLLECTIVE and not is_wait(node):
        return False  # nobody has waited for it yet
    return not wants_recompute(node) or node in bans or is_symbolic(node)


def _cost(joint: Joint, node: fx.Node, distance: int, bans: Mapping[fx.Node, Ban]) -> int | None:
    if not is_keepable(joint, node, bans):
        return None
    if not is_tensor(node):
        return SYMBOL_BYTES if is_symbolic(node) else 0
    cost = kept_bytes(node) * (FARTHEST + min(distance, FARTHEST))
    if joint.kinds[node] is Kind.VIEW:
        return kept_bytes(node) * 4 * FARTHEST + 1  # more than what it is a view of, which will do
    return cost if is_materialized(joint, node) else 2 * cost  # it would also have to be written


def _distances(joint: Joint) -> dict[fx.Node, int]:
    """How many nodes lie between each node and backward."""
    distances: dict[fx.Node, int] = {}
    for node in reversed(joint.nodes):
        if joint.sides[node] is not Side.FORWARD:
            distances[node] = 0
            continue
        users = (distances[user] + 1 for user in node.users if user.op != "output")
        distances[node] = min(users, default=FARTHEST)
    return distances

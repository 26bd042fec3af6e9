"""The work that one kernel can do at once, and where computing again would cost one more.

Computing a cheap value again is as good as free while it happens inside a kernel that runs anyway.
The three rules here name the nodes for which it would not.
"""

from __future__ import annotations

from torch import fx

from shoal.compile.node_kinds import NodeKind, op_name
from shoal.compile.partition.joint import Joint, Side

FUSIBLE = frozenset(
    {
        NodeKind.VIEW,
        NodeKind.CHEAP,
        NodeKind.REDUCTION,
        NodeKind.RANDOM,
        NodeKind.SIZE,
        NodeKind.CONSTANT,
    }
)

LONGEST_CHAIN = 100
"""How many nodes may be computed again one from another before the chain is broken."""


def fusible(joint: Joint, node: fx.Node) -> bool:
    """Whether a node can share a kernel."""
    if node.op == "output":
        return False
    if joint.kinds[node] is NodeKind.ITEM:
        producer = node.args[0]
        assert isinstance(producer, fx.Node)
        return fusible(joint, producer)
    return joint.kinds[node] in FUSIBLE


def can_fuse(joint: Joint, node: fx.Node, user: fx.Node) -> bool:
    """Whether a value never needs to be in memory for one of its readers."""
    if user.op != "output" and op_name(user) == "aten::cat":
        return True  # each part is written to its place in the result
    return fusible(joint, node) and fusible(joint, user)


def is_materialized(joint: Joint, node: fx.Node) -> bool:
    """Whether forward writes a value to memory even if nobody keeps it."""
    return node.op == "placeholder" or not all(can_fuse(joint, node, user) for user in node.users)


def costly_again(joint: Joint) -> set[fx.Node]:
    """The cheap nodes of forward that would not be cheap a second time."""
    forward = [node for node in joint.nodes if joint.sides[node] is Side.FORWARD]
    found = {node for node in forward if _is_read_in_memory(joint, node)}
    for node in forward:
        found.update(_readers_past_barrier(joint, node))
    return found | _long_chains(joint, forward, found)


def _is_read_in_memory(joint: Joint, node: fx.Node) -> bool:
    """Whether a reader in backward cannot fuse with a node, or with a view of it."""
    if joint.kinds[node] is NodeKind.VIEW:
        return False
    pending = [node]
    while pending:
        seen = pending.pop()
        for user in seen.users:
            if user.op == "output":
                continue
            if joint.sides[user] is not Side.FORWARD and not can_fuse(joint, seen, user):
                return True
            if joint.kinds[user] is NodeKind.VIEW:
                pending.append(user)
    return False


def _readers_past_barrier(joint: Joint, node: fx.Node) -> list[fx.Node]:
    """Readers of a node that come after something that cannot fuse, reached from the node too.

    A residual connection is one: computed again, it would pull the whole block's result along.
    """
    readers = [
        user for user in node.users if user.op != "output" and joint.sides[user] is Side.FORWARD
    ]
    if len(readers) < 2:
        return []
    last = max(joint.order[user] for user in readers)
    reached = set(readers)
    for place in range(joint.order[node] + 1, last + 1):
        one = joint.nodes[place]
        sources = [source for source in one.all_input_nodes if source in reached]
        if joint.sides[one] is not Side.FORWARD or not sources:
            continue
        if not all(can_fuse(joint, source, one) for source in sources):
            later = (user for user in readers if joint.order[user] > place)
            return [user for user in later if can_fuse(joint, node, user)]
        reached.add(one)
    return []


def _long_chains(joint: Joint, forward: list[fx.Node], broken: set[fx.Node]) -> set[fx.Node]:
    """The nodes before which `LONGEST_CHAIN` operators would be computed again."""
    length: dict[fx.Node, int] = {}
    found: set[fx.Node] = set()
    for node in forward:
        chains = [
            # A size that backward asked for may be of what was traced there.
            length.get(one, 0)
            for one in node.all_input_nodes
            if one not in broken and can_fuse(joint, one, node)
        ]
        length[node] = 1 + max(chains, default=0)
        if length[node] > LONGEST_CHAIN and node not in broken:
            found.add(node)
            length[node] = 0
    return found

"""Which values forward saves for backward.

First a minimum cut through the joint graph, within a memory budget:

    1    what is kept when only cheap work is done again
    0    as little as can be kept
    between, so much of the way; the most work is kept that fits

Then `without_outputs` drops outputs that a few cheap operators compute again, because a caller may
write to them, and `as_last_views` keeps a chain of views as the view that backward reads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from torch import fx

from shoal.compile.node_kinds import (
    NodeKind,
    closure,
    is_symbolic,
    is_tensor,
    is_wait,
    nodes_in,
    value,
)
from shoal.compile.partition.bans import Strength, find_bans, find_firm_bans
from shoal.compile.partition.cost import SYMBOL_BYTES, kept_bytes, work
from shoal.compile.partition.fusion import is_materialized
from shoal.compile.partition.joint import Joint, Side, phase, wants_recompute
from shoal.compile.partition.min_cut import CutNode, cheapest_kept
from shoal.compile.partition.mutation import storages
from shoal.compile.partition.split import needed_by_backward

MAX_STEPS = 10_000
"""How finely memory is counted where exact sizes would take too long."""

MAX_ATTEMPTS = 8
"""How often a choice that turned out too large is made smaller."""


def keep_within(joint: Joint, budget: float, *, static: Collection[fx.Node]) -> list[fx.Node]:
    """The values to keep within a budget between 0 and 1."""
    if not 0 <= budget <= 1:
        raise ValueError(f"expected a memory budget between 0 and 1, got {budget}")
    bans = find_bans(joint)

    def keep(banned: Collection[fx.Node]) -> tuple[list[fx.Node], int]:
        kept = kept_by_min_cut(joint, banned, static=static)
        return kept, sum(kept_bytes(node) for node in kept if node not in static)

    most, ceiling = keep(bans)
    if budget == 1:
        return most
    firm = {node for node, strength in bans.items() if strength is Strength.ALWAYS}
    loose = [node for node, strength in bans.items() if strength is Strength.WORK]
    _, floor = keep(firm)
    capacity = int(budget * max(ceiling - floor, 0))
    allowed = floor + capacity
    for kept, num_bytes in ((most, ceiling), keep(firm.union(loose))):
        if num_bytes <= allowed:
            return kept
    sizes = [kept_bytes(node) for node in loose]
    gains = [work(node) for node in loose]
    kept = most
    for _ in range(MAX_ATTEMPTS):
        chosen = [loose[place] for place in most_worth(sizes, gains, capacity)]
        kept, num_bytes = keep(firm.union(chosen))
        if num_bytes <= allowed or capacity <= 0:
            break
        # Values that keep each other company were counted apart: leave as much room for them.
        capacity = max(capacity - (num_bytes - allowed), 0)
    return kept


def most_worth(sizes: Sequence[int], worth: Sequence[int], capacity: int) -> list[int]:
    """The places of the things to pack, worth the most together and no larger than the capacity."""
    if capacity <= 0:
        return [place for place, size in enumerate(sizes) if size == 0]
    step = math.gcd(*sizes) or 1
    step = max(step, -(-capacity // MAX_STEPS))
    room = capacity // step
    needed = [-(-size // step) for size in sizes]
    best = np.zeros(room + 1, dtype=np.int64)
    taken = np.zeros((len(sizes), room + 1), dtype=bool)
    for place, (size, gain) in enumerate(zip(needed, worth, strict=True)):
        if size > room:
            continue
        with_it = best[: room + 1 - size] + gain
        taken[place, size:] = with_it > best[size:]
        best[size:] = np.maximum(best[size:], with_it)
    chosen = []
    for place in reversed(range(len(sizes))):
        if taken[place, room]:
            chosen.append(place)
            room -= needed[place]
    return sorted(chosen)


FARTHEST = 100
"""A value this many nodes away from backward weighs twice what it takes: chains stay short."""


def kept_by_min_cut(
    joint: Joint, banned: Collection[fx.Node], *, static: Collection[fx.Node] = ()
) -> list[fx.Node]:
    """The values to keep: as few bytes as can be where the banned nodes are not computed again.

    `static` are inputs that live on anyway, such as parameters: keeping them is free.
    """
    needed = set(nodes_in(joint.backward_outputs))
    distances = _distances(joint)
    nodes = [
        CutNode(
            name=node.name,
            cost=0 if node in static else _cost(joint, node, distances[node], banned),
            reads=tuple(joint.order[one] for one in node.all_input_nodes),
            only_forward=node in banned,
            only_backward=joint.sides[node] is Side.BACKWARD,
            needed=node in needed,
        )
        for node in joint.nodes
    ]
    return [joint.nodes[place] for place in cheapest_kept(nodes)]


def is_keepable(joint: Joint, node: fx.Node, banned: Collection[fx.Node]) -> bool:
    """Whether a value can cross from forward to backward, and is not tagged to be made again."""
    kind, held = joint.kinds[node], value(node)
    if kind is NodeKind.CONSTANT or held is None or isinstance(held, list | tuple | dict):
        return False
    if kind is NodeKind.COLLECTIVE and not is_wait(node):
        return False  # nobody has waited for it yet
    return not wants_recompute(node) or node in banned or is_symbolic(node)


def _cost(joint: Joint, node: fx.Node, distance: int, banned: Collection[fx.Node]) -> int | None:
    if not is_keepable(joint, node, banned):
        return None
    if not is_tensor(node):
        return SYMBOL_BYTES if is_symbolic(node) else 0
    cost = kept_bytes(node) * (FARTHEST + min(distance, FARTHEST))
    if joint.kinds[node] is NodeKind.VIEW:
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


FREE = frozenset({NodeKind.VIEW, NodeKind.SIZE})

FEW = 4
"""How many cheap operators may run again so that an output is not kept."""


def without_outputs(joint: Joint, kept: Sequence[fx.Node]) -> list[fx.Node]:
    """The same values to keep, less those outputs that a few cheap operators make of the others.

    forward   a ──► add ──► tanh ─► …       returns add; backward reads a and tanh
    kept      a, add                 ──►    kept  a
    backward  add ──► tanh ─► …             backward  a ──► add ──► tanh ─► …

    Autograd refuses a backward of which anything kept was written to. Eager keeps what backward
    reads and nothing that is only computed with, so that there a caller may write to such an
    output.
    """
    returned = storages(nodes_in(joint.forward_outputs))
    left = set(kept)
    for node in kept:
        if (
            joint.kinds[node] is NodeKind.CHEAP
            and not returned.isdisjoint(storages([node]))
            and not _is_read_by_backward(joint, node)
            and _is_cheap_again(joint, node, left - {node})
        ):
            left.remove(node)
    return joint.in_order(left)


def _is_read_by_backward(joint: Joint, node: fx.Node) -> bool:
    """Whether backward reads a value itself, or a view of it: then eager has kept it too."""
    return node in joint.backward_outputs or any(
        phase(user) == "backward"
        or (joint.kinds[user] is NodeKind.VIEW and _is_read_by_backward(joint, user))
        for user in node.users
        if user.op != "output"
    )


def _is_cheap_again(joint: Joint, node: fx.Node, kept: set[fx.Node]) -> bool:
    again = closure([node], lambda one: () if one in kept else one.all_input_nodes) - kept
    calls = [one for one in again if joint.kinds[one] not in FREE]
    return (
        len(calls) <= FEW
        and all(joint.kinds[one] is NodeKind.CHEAP for one in calls)
        and find_firm_bans(joint).isdisjoint(again)
    )


FUSED = (NodeKind.CHEAP, NodeKind.REDUCTION)
"""The kinds of nodes whose kernels read their arguments through views."""


def as_last_views(joint: Joint, kept: Sequence[fx.Node]) -> list[fx.Node]:
    """The same values to keep, each as the last view through which all of backward reads it.

    forward   mm ──► view ──► permute ─┐            mm ──► view ──► permute ─┐
    kept      mm                       │     ──►                   permute   │
    backward  mm ──► view ──► permute ─┴─► …        permute ─────────────────┴─► …

    A view costs nothing to keep that its base does not cost, and a call to take again; but none
    where it fuses into the kernel that reads it.

    Inputs stay themselves: they live on anyway, and compilers know where they are. So does what
    forward returns, whose writers would not be noticed through another tensor.
    """
    chosen = set(kept)
    needed = needed_by_backward(joint, chosen)
    given = set(nodes_in(joint.backward_outputs))
    fixed = joint.written | storages(nodes_in((joint.forward_inputs, joint.forward_outputs)))
    last: list[fx.Node] = []
    for node in kept:
        view = node
        while is_tensor(node) and view not in given and fixed.isdisjoint(storages([node])):
            readers = [user for user in view.users if user in needed and user not in chosen]
            if len(readers) != 1 or not _is_free_view(joint, readers[0]):
                break
            view = readers[0]
        last.append(node if _only_fuses(joint, view, needed) else view)
    return last


def _is_free_view(joint: Joint, node: fx.Node) -> bool:
    return (
        joint.kinds[node] is NodeKind.VIEW
        and joint.sides[node] is Side.FORWARD
        and is_tensor(node)
        and len(node.all_input_nodes) == 1
        and not wants_recompute(node)
    )


def _only_fuses(joint: Joint, view: fx.Node, needed: set[fx.Node]) -> bool:
    """Whether all that backward does with a view takes it along, or looks at it in another way."""
    return all(
        _only_fuses(joint, one, needed)
        if joint.kinds[one] is NodeKind.VIEW
        else joint.kinds[one] in FUSED
        for one in view.users
        if one in needed
    )

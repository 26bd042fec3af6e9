"""What is kept for backward, as backward first reads it.

forward   mm ──► view ──► permute ─┐            mm ──► view ──► permute ─┐
kept       mm                      │     ──►                   permute   │
backward  mm ──► view ──► permute ─┴─► …        permute ─────────────────┴─► …

A view costs nothing to keep that its base does not cost, and a call to take again; but none where
it fuses into the kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from shoal.compile.partition.joint import Joint, Side, wants_recompute
from shoal.compile.partition.mutation import storages
from shoal.compile.partition.ops import Kind, is_tensor
from shoal.compile.partition.split import needed_by_backward

FUSED = (Kind.CHEAP, Kind.REDUCTION)
"""What takes views of its arguments along."""


def as_last_views(joint: Joint, kept: Sequence[fx.Node]) -> list[fx.Node]:
    """The same values to keep, each as the last view through which all of backward reads it.

    Inputs stay themselves: they live on anyway, and compilers know where they are. So does what
    forward returns, whose writers would not be noticed through another tensor.
    """
    chosen = set(kept)
    needed = needed_by_backward(joint, chosen)
    given = {one for one in joint.backward_outputs if isinstance(one, fx.Node)}
    fixed = joint.written | storages(
        one for one in (*joint.forward_inputs, *joint.forward_outputs) if isinstance(one, fx.Node)
    )
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
        joint.kinds[node] is Kind.VIEW
        and joint.sides[node] is Side.FORWARD
        and is_tensor(node)
        and len(node.all_input_nodes) == 1
        and not wants_recompute(node)
    )


def _only_fuses(joint: Joint, view: fx.Node, needed: set[fx.Node]) -> bool:
    """Whether all that backward does with a view takes it along, or looks at it in another way."""
    return all(
        _only_fuses(joint, one, needed)
        if joint.kinds[one] is Kind.VIEW
        else joint.kinds[one] in FUSED
        for one in view.users
        if one in needed
    )

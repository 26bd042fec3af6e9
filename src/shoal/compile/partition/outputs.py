"""Outputs that are not kept for backward, because a caller may write to them.

forward   a ──► add ──► tanh ─► …       returns add; backward reads a and tanh
kept      a, add                 ──►    kept  a
backward  add ──► tanh ─► …             backward  a ──► add ──► tanh ─► …

Autograd refuses a backward of which anything kept was written to. Eager keeps what backward reads
and nothing that is only computed with, so that there such a write is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from shoal.compile.partition.bans import find_firm_bans
from shoal.compile.partition.joint import Joint, phase
from shoal.compile.partition.mutation import storages
from shoal.compile.partition.ops import Kind
from shoal.compile.partition.split import closure

FREE = frozenset({Kind.VIEW, Kind.SIZE})

FEW = 4
"""How many cheap operators may run again so that an output is not kept."""


def without_outputs(joint: Joint, kept: Sequence[fx.Node]) -> list[fx.Node]:
    """The same values to keep, less those outputs that a few cheap operators make of the others."""
    returned = storages(one for one in joint.forward_outputs if isinstance(one, fx.Node))
    left = set(kept)
    for node in kept:
        if (
            joint.kinds[node] is Kind.CHEAP
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
        or (joint.kinds[user] is Kind.VIEW and _is_read_by_backward(joint, user))
        for user in node.users
        if user.op != "output"
    )


def _is_cheap_again(joint: Joint, node: fx.Node, kept: set[fx.Node]) -> bool:
    again = closure([node], lambda one: () if one in kept else one.all_input_nodes) - kept
    calls = [one for one in again if joint.kinds[one] not in FREE]
    return (
        len(calls) <= FEW
        and all(joint.kinds[one] is Kind.CHEAP for one in calls)
        and find_firm_bans(joint).keys().isdisjoint(again)
    )

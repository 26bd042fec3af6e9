"""The values of forward that backward must not compute again."""

from __future__ import annotations

from enum import IntEnum

from torch import fx

from shoal.compile.node_kinds import NodeKind
from shoal.compile.partition.cost import kept_bytes
from shoal.compile.partition.fusion import costly_again
from shoal.compile.partition.joint import (
    CheckpointPolicy,
    Joint,
    Side,
    is_size_of_tensor,
    wants_recompute,
)
from shoal.compile.partition.mutation import reads_any

SMALL_RESULT = 4
"""A reduction whose result is so many times smaller than what it reads is kept."""

WITH_OTHERS = frozenset({NodeKind.VIEW, NodeKind.SIZE, NodeKind.ITEM, NodeKind.CONSTANT})
"""The kinds of nodes that take no kernel of their own."""


class Strength(IntEnum):
    """How firmly a value is not computed again."""

    FUSION = 1
    """It would take a kernel more."""
    WORK = 2
    """It is much work; done again where memory is short."""
    ALWAYS = 3
    """The result could be wrong."""


def find_bans(joint: Joint) -> dict[fx.Node, Strength]:
    """The nodes of forward that are not computed again; those tagged for it are, where they may."""
    bans = dict.fromkeys(find_firm_bans(joint), Strength.ALWAYS)
    costly = costly_again(joint)
    for node in joint.nodes:
        if node in bans or joint.sides[node] is not Side.FORWARD or wants_recompute(node):
            continue
        if _is_much_work(joint, node):
            bans[node] = Strength.WORK
        elif node in costly and joint.kinds[node] not in WITH_OTHERS:
            bans[node] = Strength.FUSION
    return bans


def find_firm_bans(joint: Joint) -> set[fx.Node]:
    """The nodes of forward that no budget and no tag may have computed again."""
    bans: set[fx.Node] = set()
    for node in joint.nodes:
        if joint.sides[node] is Side.FORWARD:
            is_item = joint.kinds[node] is NodeKind.ITEM
            if _is_firm(joint, node) or (is_item and node.all_input_nodes[0] in bans):
                bans.add(node)
    return bans


def _is_firm(joint: Joint, node: fx.Node) -> bool:
    kind = joint.kinds[node]
    return (
        kind in (NodeKind.INPUT, NodeKind.EFFECT, NodeKind.MUTATION)
        or is_size_of_tensor(node, kind)  # kept instead of the tensor
        or reads_any(node, joint.written)
        or node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
        or (kind in (NodeKind.RANDOM, NodeKind.COLLECTIVE) and not wants_recompute(node))
    )


def _is_much_work(joint: Joint, node: fx.Node) -> bool:
    kind = joint.kinds[node]
    if kind is NodeKind.EXPENSIVE or node.meta.get("recompute") is CheckpointPolicy.PREFER_SAVE:
        return True
    if kind not in WITH_OTHERS and reads_any(node, joint.handed_out):
        return True  # the caller sees what it reads, and may write to it
    if kind is not NodeKind.REDUCTION:
        return False
    return kept_bytes(node) * SMALL_RESULT < sum(map(kept_bytes, node.all_input_nodes))

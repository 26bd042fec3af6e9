"""Which values of forward backward must not compute again, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import fx

from shoal.compile.node_kinds import Kind
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

WITH_OTHERS = frozenset({Kind.VIEW, Kind.SIZE, Kind.ITEM, Kind.CONSTANT})
"""What takes no kernel of its own."""

SEEN_OUTSIDE = frozenset({Kind.EFFECT, Kind.MUTATION})


class Strength(IntEnum):
    """How firmly a value is not computed again."""

    FUSION = 1
    """It would take a kernel more."""
    WORK = 2
    """It is much work; done again where memory is short."""
    ALWAYS = 3
    """The result could be wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """Why a value is not computed again."""

    strength: Strength
    reason: str


def find_bans(joint: Joint) -> dict[fx.Node, Ban]:
    """The nodes of forward that are not computed again; those tagged for it are, where they may."""
    bans = find_firm_bans(joint)
    costly = costly_again(joint)
    for node in joint.nodes:
        if node in bans or joint.sides[node] is not Side.FORWARD or wants_recompute(node):
            continue
        if (reason := _work(joint, node)) is not None:
            bans[node] = Ban(strength=Strength.WORK, reason=reason)
        elif node in costly and joint.kinds[node] not in WITH_OTHERS:
            bans[node] = Ban(strength=Strength.FUSION, reason=costly[node])
    return bans


def find_firm_bans(joint: Joint) -> dict[fx.Node, Ban]:
    """The nodes of forward that no budget and no tag may have computed again."""
    bans: dict[fx.Node, Ban] = {}
    for node in joint.nodes:
        if joint.sides[node] is not Side.FORWARD:
            continue
        reason = _always(joint, node)
        if reason is None and joint.kinds[node] is Kind.ITEM:
            producer = bans.get(node.all_input_nodes[0])
            reason = producer.reason if producer is not None else None
        if reason is not None:
            bans[node] = Ban(strength=Strength.ALWAYS, reason=reason)
    return bans


def _always(joint: Joint, node: fx.Node) -> str | None:
    kind = joint.kinds[node]
    if kind in SEEN_OUTSIDE or kind is Kind.INPUT:
        return f"it is {kind.value}"
    if is_size_of_tensor(node, kind):
        return "it is kept instead of the tensor"
    if reads_any(node, joint.written):
        return "it reads memory that is written to"
    if node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE:
        return "a checkpoint says so"
    if kind in (Kind.RANDOM, Kind.COLLECTIVE) and not wants_recompute(node):
        return f"it is {kind.value}"
    return None


def _work(joint: Joint, node: fx.Node) -> str | None:
    kind = joint.kinds[node]
    if kind is Kind.EXPENSIVE:
        return f"it is {kind.value}"
    if kind not in WITH_OTHERS and reads_any(node, joint.handed_out):
        return "the caller sees what it reads, and may write to it"
    if node.meta.get("recompute") is CheckpointPolicy.PREFER_SAVE:
        return "a checkpoint prefers so"
    if kind is Kind.REDUCTION:
        read = sum(kept_bytes(one) for one in node.all_input_nodes)
        if kept_bytes(node) * SMALL_RESULT < read:
            return "its result is small"
    return None

"""Ranks compare the collectives of a graph before they run it.

A rank that captured another order would hang the rest. What each is about to issue travels through
the job's store: nobody can hang in a collective that only some ranks enter. There, too, a rank says
that it has failed before it could compare.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from shoal._torch import collectives, operators
from shoal.compile.aot.lowered import Lowered
from shoal.compile.passes.collectives import collective, sent_nodes
from shoal.errors import RankError
from shoal.runtime.rank_guard import check_collectives_agree, tell_failure


def check_ranks_agree(lowered: Lowered) -> None:
    """Raise on every rank if the ranks of a group have captured different collectives."""
    found = collectives_of(lowered)
    for group in (groups := sorted(found)):
        try:
            check_collectives_agree(collectives.group_named(group), found[group])
        except RankError as error:
            tell_groups([later for later in groups if later > group], str(error))
            raise


def collectives_of(lowered: Lowered) -> dict[str, list[str]]:
    """The collectives of both graphs in their order, described, by the name of their group."""
    found: dict[str, list[str]] = {}
    if dist.is_available() and dist.is_initialized():
        for phase, module in (("forward", lowered.forward), ("backward", lowered.backward)):
            if module is not None:
                _collect(phase, module, found)
    return found


def tell_groups(groups: Iterable[str], failure: str) -> None:
    """Let nobody in some groups wait for this rank, which has failed before it could compare."""
    for group in sorted(groups):
        tell_failure(collectives.group_named(group), failure)


def _collect(phase: str, module: GraphModule, found: dict[str, list[str]]) -> None:
    """Describe the collectives of a graph in their order, by group."""
    for node in module.graph.nodes:
        if collective(node) is None:
            continue
        op = node.target
        given = {
            a.name: v for a, v in operators.given_arguments(op._schema, node.args, node.kwargs)
        }
        group = given.pop("group_name", None)
        if group is None:  # an older operator, which carries its group along
            continue
        rest = [f"{k}={v}" for k, v in given.items() if not isinstance(v, (Node, list, tuple))]
        sent = ", ".join(_described(one) for one in sent_nodes(node))
        text = f"{op.overloadpacket.__name__}({sent}; {', '.join(rest)}) in {phase}"
        found.setdefault(str(group), []).append(text)


def _described(node: Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else "?"

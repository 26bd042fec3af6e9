"""Ranks compare the collectives of a graph before they run it.

A rank that captured another order would hang the rest. What each is about to issue travels through
the job's store: nobody can hang in a collective that only some ranks enter.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from shoal import _torch
from shoal.compile.aot.lowered import Lowered
from shoal.compile.passes.collectives import collective, sent_nodes
from shoal.runtime.guard import check_collectives_agree


def check_ranks_agree(lowered: Lowered) -> None:
    """Raise on every rank if the ranks of a group have captured different collectives."""
    if not dist.is_available() or not dist.is_initialized():
        return
    found: dict[str, list[str]] = {}
    for phase, module in (("forward", lowered.forward), ("backward", lowered.backward)):
        if module is not None:
            _collect(phase, module, found)
    for group, sequence in sorted(found.items()):
        check_collectives_agree(_torch.group_named(group), sequence)


def _collect(phase: str, module: GraphModule, found: dict[str, list[str]]) -> None:
    """Describe the collectives of a graph in their order, by group."""
    for node in module.graph.nodes:
        if collective(node) is None:
            continue
        op = node.target
        given = {a.name: v for a, v in _torch.given_arguments(op._schema, node.args, node.kwargs)}
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

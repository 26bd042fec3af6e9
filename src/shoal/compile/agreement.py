"""Ranks compare the collectives of a graph before they run it.

A rank that captured another order would hang the rest. What each is about to issue travels through
the job's store: nobody can hang in a collective that only some ranks enter.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from shoal import _torch_compile as adapter
from shoal.compile.aot.lowered import Lowered
from shoal.runtime.guard import check_collectives_agree

_NAMESPACE = "_c10d_functional"
_WAITS = ("wait_tensor",)


def check_ranks_agree(lowered: Lowered) -> None:
    """Raise on every rank if the ranks of a group have captured different collectives."""
    if not dist.is_available() or not dist.is_initialized():
        return
    found: dict[str, list[str]] = {}
    for phase, module in (("forward", lowered.forward), ("backward", lowered.backward)):
        if module is not None:
            _collect(phase, module, found)
    for group, sequence in sorted(found.items()):
        check_collectives_agree(adapter.group_named(group), sequence)


def _collect(phase: str, module: GraphModule, found: dict[str, list[str]]) -> None:
    """Describe the collectives of a graph in their order, by group."""
    for node in module.graph.nodes:
        op = node.target
        if not isinstance(op, adapter.OpOverload) or op.namespace != _NAMESPACE:
            continue
        name = op.overloadpacket.__name__
        if name in _WAITS:
            continue
        given = {a.name: v for a, v in adapter.bind(op._schema, node.args, node.kwargs)}
        group = given.pop("group_name")
        rest = [f"{key}={value}" for key, value in given.items() if not _is_node(value)]
        sent = ", ".join(_described(one) for one in node.all_input_nodes)
        found.setdefault(str(group), []).append(f"{name}({sent}; {', '.join(rest)}) in {phase}")


def _is_node(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(one, Node) for one in value)
    return isinstance(value, Node)


def _described(node: Node) -> str:
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else "?"

"""Collectives as nodes of a graph."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d


def gather_in_graph(shard: Tensor, size: int, group: dist.ProcessGroup) -> Tensor:
    """An all-gather as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(shard, size, group.group_name))


def reduce_scatter_in_graph(
    rows: Tensor, size: int, group: dist.ProcessGroup, reduction: str = "sum"
) -> Tensor:
    """A reduce-scatter that adds, or averages, as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(rows, reduction, size, group.group_name))


def all_reduce_in_graph(tensor: Tensor, group: dist.ProcessGroup, reduction: str = "sum") -> Tensor:
    """An all-reduce that adds, or averages, as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(tensor, reduction, group.group_name))


def broadcast_in_graph(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    """What one rank of a group has, as nodes of a graph."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.broadcast(tensor, source, group.group_name))


def group_named(name: str) -> dist.ProcessGroup:
    """The process group that a collective in a graph names."""
    return c10d._resolve_process_group(cast(Any, name))

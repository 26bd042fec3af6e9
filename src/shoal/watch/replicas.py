"""Comparing replicas: weights that should be copies of each other, and whether they still are.

A flipped bit on one replica changes its gradients, and by them all replicas, without a word. What
is compared are checksums: two numbers for each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.observer import waiting
from shoal.distant import distant_replicas_of
from shoal.errors import RankError

_BLOCK = 1 << 22
"""So many elements are summed at a time, so that the check needs little memory."""


def check_replicas(model: nn.Module, *, group: ProcessGroup | None = None) -> int:
    """Raise on all ranks of a group, naming parameter and rank, if replicas differ; collective.

    Parameters that are `DTensor`s are compared along every axis of their mesh on which they are
    replicated. Plain ones are compared over `group`, where one is given, or over that of
    `DistributedDataParallel`; else they are nobody's copies. Of distant replicas the anchors are
    compared. Returns how many were compared.
    """
    if group is None and isinstance(model, DistributedDataParallel):
        group = model.process_group
    by_group: dict[ProcessGroup, dict[str, Tensor]] = {}
    outer = distant_replicas_of(model)
    anchors = {}
    if outer is not None:
        outer.settle()
        anchors = outer.anchors()
    for name, parameter in model.named_parameters():
        local, groups = _copies(anchors.get(parameter, parameter), group)
        for found in groups:
            by_group.setdefault(found, {})[name] = local
    # In one order on all ranks: that in which the parameters name them.
    for found, tensors in by_group.items():
        _compare(found, tensors)
    return sum(len(tensors) for tensors in by_group.values())


def _copies(parameter: Tensor, group: ProcessGroup | None) -> tuple[Tensor, list[ProcessGroup]]:
    """This rank's part of a parameter, and the groups whose ranks hold copies of it."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), [] if group is None else [group]
    mesh = parameter.device_mesh
    groups = [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, Replicate) and mesh.size(axis) > 1
    ]
    return parameter.to_local().detach(), groups


def _compare(group: ProcessGroup, tensors: Mapping[str, Tensor]) -> None:
    mine = torch.stack([_checksum(tensor) for tensor in tensors.values()])
    rows = [torch.empty_like(mine) for _ in range(group.size())]
    with waiting("the checksums of the replicas"):
        dist.all_gather(rows, mine, group=group)
        table = torch.stack(rows).cpu()  # (rank, parameter, 2)
    differ = (table != table[:1]).any(dim=-1)
    if not differ.any():
        return
    ranks = dist.get_process_group_ranks(group)
    lines = []
    for index, name in enumerate(tensors):
        if differ[:, index].any():
            lines.append(f"{name!r}: {_who_differs(table[:, index].tolist(), ranks)}")
    first, more = lines[0], len(lines) - 1
    raise RankError(
        f"replicas of parameter {first}"
        + (f", and {more} more parameters differ" if more else "")
        + ". Memory was corrupted, or ranks updated their weights differently: go on from a "
        "checkpoint, and look at that rank's hardware."
    )


def _who_differs(sums: list[list[int]], ranks: list[int]) -> str:
    """Name the ranks in the minority; of two ranks, neither is."""
    values = [tuple(row) for row in sums]
    usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
    odd = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
    if 2 * len(odd) >= len(ranks):
        return f"ranks {', '.join(map(str, ranks))} hold different values"
    plural = "s" if len(odd) > 1 else ""
    return f"rank{plural} {', '.join(map(str, odd))} differ{'' if plural else 's'} from the others"


def _checksum(tensor: Tensor) -> Tensor:
    """Two sums over the bits: of all words, and of all words times their place."""
    words = _words(tensor)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _BLOCK):
        block = words[start : start + _BLOCK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + block.numel(), device=tensor.device)
        total += torch.stack([block.sum(), (block * places).sum()])  # wraps around alike
    return total


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as whole numbers."""
    flat = tensor.contiguous().view(-1)
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.view(sizes[flat.element_size()])

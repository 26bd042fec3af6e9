"""Multi-tensor steps of torch's optimizers, on lists of local tensors from the outset.

An optimizer groups its lists by device and dtype, and then works on what it gets. Here grouping
unwraps, so that torch need not carry hundreds of tensors of a subclass to Python and back.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal._torch import distributed_tensor
from shoal.tensor.sharded import Kind, ShardedTensor

Lists: TypeAlias = list[list[Any]]
Groups: TypeAlias = dict[Kind, tuple[Lists, list[int]]]
"""For each kind the parts of all lists, and where in the lists they were."""

ELEMENTWISE = frozenset(
    f"torch.optim.{name}"
    for name in (
        "adadelta",
        "adagrad",
        "adam",
        "adamax",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
    )
)
"""Modules whose steps never look across elements, and write only into the tensors of the lists.

Any other optimizer (Adafactor has means over rows) gets the sharded tensors, whose operations
know about the other ranks.
"""


def grouped(module: str, lists: Lists) -> Groups | None:
    """Group the local tensors for a module's step; None where torch shall group what it has."""
    if module not in ELEMENTWISE or not lists[0]:
        return None
    if not isinstance(lists[0][0], ShardedTensor):
        return _grouped_by_class(lists)
    try:
        placements = [tensor.placement for tensor in lists[0]]
        kinds = [tensor.kind for tensor in lists[0]]
        local_lists: Lists = []
        for tensors in lists:
            if not tensors or _are_step_counts(tensors):
                local_lists.append([*tensors])
                continue
            # What differs goes the slow way, which says what, or finds that cuts agree.
            if [tensor.placement for tensor in tensors] != placements:
                return None
            if [tensor.kind for tensor in tensors] != kinds:
                return None
            local_lists.append([tensor.local for tensor in tensors])
    except AttributeError:
        return _grouped_by_class(lists)
    return _by_kind(kinds, local_lists)


def _grouped_by_class(lists: Lists) -> Groups | None:
    """Do as `grouped` does where DTensors, or plain tensors, stand beside ShardedTensors."""
    if not any(isinstance(tensor, ShardedTensor) for tensor in lists[0]):
        return None
    parameters = [*map(_local_and_place, lists[0])]
    if any(local is None for local, _ in parameters):  # a rank has several shards of it
        return None
    local_lists: Lists = []
    for tensors in lists:
        if not tensors or _are_step_counts(tensors):
            local_lists.append([*tensors])
            continue
        found = [*map(_local_and_place, tensors)]
        if [place for _, place in found] != [place for _, place in parameters]:
            return None
        local_lists.append([local for local, _ in found])
    return _by_kind([(local.device, local.dtype) for local, _ in parameters], local_lists)


def _local_and_place(tensor: Any) -> tuple[Any, object]:
    """A tensor's local one, and what its gradient and its state must have in common with it."""
    if isinstance(tensor, DTensor):
        local = distributed_tensor.local_tensor(tensor)
        return local, (local.dtype, distributed_tensor.place_getter(tensor))
    if isinstance(tensor, ShardedTensor):
        local = getattr(tensor, "local", None)
        return local, (tensor.dtype, tensor.placement)
    return tensor, None if tensor is None else (tensor.dtype, tensor.shape)


def _by_kind(kinds: list[Kind], lists: Lists) -> Groups:
    if kinds.count(kinds[0]) == len(kinds):
        return {kinds[0]: (lists, [*range(len(kinds))])}
    found: dict[Kind, list[int]] = {}
    for index, kind in enumerate(kinds):
        found.setdefault(kind, []).append(index)
    return {
        kind: ([[tensors[i] for i in indices] if tensors else [] for tensors in lists], indices)
        for kind, indices in found.items()
    }


def _are_step_counts(tensors: list[Any]) -> bool:
    return {*map(type, tensors)} == {Tensor} and not any(map(Tensor.dim, tensors))

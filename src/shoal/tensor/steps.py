"""Multi-tensor steps of torch's optimizers, on lists of local tensors from the outset.

An optimizer groups its lists by device and dtype, and then works on what it gets. Here grouping
unwraps, so that torch need not carry hundreds of tensors of a subclass to Python and back.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

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
    if module not in ELEMENTWISE or not lists[0] or not isinstance(lists[0][0], ShardedTensor):
        return None
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
        return None  # some are plain, or not there yet
    return _by_kind(kinds, local_lists)


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

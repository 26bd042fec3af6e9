"""Multi-tensor steps of torch's optimizers, on lists of local tensors from the outset.

An optimizer groups its lists by device and dtype, and then works on what it gets. Grouping
unwraps: torch reads local tensors at a fifth of what hundreds of tensors of a subclass cost.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

from shoal.tensor.sharded import Kind, ShardedTensor

Lists: TypeAlias = list[list[Any]]
Groups: TypeAlias = dict[Kind, tuple[Lists, list[int]]]

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


def grouped(module: str, lists: Lists, with_indices: bool) -> Groups | None:
    """Group the local tensors for a module's step; None where torch shall group what it has."""
    if module not in ELEMENTWISE or not lists[0] or not isinstance(lists[0][0], ShardedTensor):
        return None
    try:
        placements = [tensor.placement for tensor in lists[0]]
        kinds = [tensor.kind for tensor in lists[0]]
        if kinds.count(kinds[0]) != len(kinds):
            return None
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
    return {kinds[0]: (local_lists, list(range(len(kinds))) if with_indices else [])}


def _are_step_counts(tensors: list[Any]) -> bool:
    return {*map(type, tensors)} == {Tensor} and not any(map(Tensor.dim, tensors))

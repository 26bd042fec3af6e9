"""What a step is called with: tensors that a graph reads, and values that are constants of it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from shoal._torch import storage, trees
from shoal.errors import UsageError

CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, Enum),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, slice, range),
)
"""Types of values that cannot change, and hold no tensors."""


class StepData:
    """The inputs and targets of one step, as a list."""

    __slots__ = ("described", "storages", "structure", "values")

    def __init__(self, inputs: Any, targets: Any) -> None:
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            self.values: list[Any] = [inputs, targets]  # ten times as fast
            self.structure: Any = None
        else:
            self.values, self.structure = trees.tree_flatten((inputs, targets))
        self.storages: dict[int | None, int] = {}
        """The memory that the tensors lie in, and the first tensor in each."""
        self.described = self._described()
        """All that a graph depends on but the tensors' elements; to be compared."""

    def unflattened(self, values: Any) -> Any:
        """Other values in the places of these: inputs, targets."""
        return values if self.structure is None else trees.tree_unflatten(values, self.structure)

    def _described(self) -> list[Any]:
        first: dict[int, int] = {}
        found: list[Any] = []
        for at, one in enumerate(self.values):
            if not isinstance(one, Tensor):
                value = _checked(one)
                # Words tell -0.0 from 0.0, and are equal for two NaNs.
                found.append((type(one), repr(value) if type(value) in (float, complex) else value))
                continue
            if one.requires_grad:
                raise UsageError(
                    f"an input of shape {tuple(one.shape)} requires a gradient, which compile_step "
                    "would not give it: it differentiates by the model's parameters alone. Give "
                    "it one.detach(), or call loss.backward() and optimizer.step() yourself."
                )
            same = first.setdefault(id(one), at)
            shared = self.storages.setdefault(storage.storage_key(one), at)
            place = None if shared == at else (shared, one.storage_offset())
            strides = one.stride() if one.layout is torch.strided else one.layout
            found.append(
                (type(one), one.shape, strides, one.dtype, one.device, one.is_conj(), same, place)
            )
        return found


def _checked(one: object) -> object:
    """A value that can be a constant of a graph; refused if it might change or hold tensors."""
    if isinstance(one, CONSTANTS):
        return one
    kind = type(one)
    raise NotImplementedError(
        f"shoal: compile_step cannot look into a {kind.__module__}.{kind.__qualname__} among its "
        "inputs, which might hold tensors. Give it tensors, numbers and strings, in tuples, lists "
        "and dictionaries."
    )

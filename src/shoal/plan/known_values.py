"""Values that a forecast does know: those of indices and masks that depend on no input.

A model may ask whether its own `torch.arange` is contiguous before it builds a mask. On meta nobody
could answer. So small integer and boolean tensors that come from constants alone are computed on
the CPU as well, and their values are there for whoever asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shoal._torch import trees

_aten: Any = torch.ops.aten
_INDEXING = frozenset({_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
LARGEST = 1 << 20
"""Of how many elements a tensor may be known."""
_RANDOM = frozenset({_aten.randint, _aten.randperm, _aten.random_, _aten.bernoulli_})
_EMPTY = frozenset({_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided})


class KnownValues:
    """Which tensors on meta have values, and which."""

    def __init__(self) -> None:
        self._values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._wrong: set[int] = set()
        """Memory that something unknown was written to."""

    def of(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, if they are known."""
        value = self._values.get(tensor)
        return None if value is None or _memory(value) in self._wrong else value

    def answer(self, func: Any, args: Sequence[Any]) -> Any:
        """What an operator returns that asks for values; None if they are not known."""
        value = self.of(args[0])
        if value is None:
            return None
        if func.overloadpacket is _aten._local_scalar_dense:
            return value.item()
        return self._on_meta(value.nonzero())

    def without_masks(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of an indexing operator with numbers for known masks."""
        if func.overloadpacket not in _INDEXING:
            return args
        found: list[Tensor | None] = []
        for index in args[1]:
            value = self.of(index) if isinstance(index, Tensor) else None
            if value is None or value.dtype is not torch.bool:
                found.append(index)
            else:
                found += map(self._on_meta, value.nonzero(as_tuple=True))
        return (args[0], found, *args[2:])

    def _on_meta(self, value: Tensor) -> Tensor:
        meta = torch.empty_like(value, device="meta")
        self._values[meta] = value
        return meta

    def follow(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]
    ) -> None:
        """An operator ran on meta: run it on known values too, if all it takes are known."""
        tensors = [one for one in trees.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        written = func._schema.is_mutable
        known = [self.of(one) for one in tensors]
        is_known = all(one is not None for one in known)
        if written and not is_known:
            self._wrong.update(_memory(one) for one in known if one is not None)
            return
        packet = func.overloadpacket
        if not is_known or packet in _RANDOM or packet in _EMPTY:
            return
        if any(one.is_floating_point() or one.numel() > LARGEST for one in outputs):
            return

        def real(one: Any) -> Any:
            if isinstance(one, Tensor):
                return self.of(one)
            return torch.device("cpu") if isinstance(one, torch.device) else one

        values = func(
            *trees.tree_map(real, tuple(args)),
            **{name: trees.tree_map(real, one) for name, one in kwargs.items()},
        )
        found = [one for one in trees.tree_leaves(values) if isinstance(one, Tensor)]
        for meta, value in zip(outputs, found, strict=True):
            self._values[meta] = value


ASKING = frozenset({_aten._local_scalar_dense, _aten.nonzero})
"""The operators that ask for values."""


def _memory(value: Tensor) -> int:
    return value.untyped_storage()._cdata

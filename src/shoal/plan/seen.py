"""What operators returned before: a forecast asks each of them once for each set of shapes.

torch works out on meta, in Python, what an operator returns. A model of equal blocks, three steps,
and a search over plans ask for the same again and again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.plan.costs import Cost, cost_of

LARGEST = 100_000
"""How many answers are kept."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A new tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Answer:
    """What an operator returns: new tensors, and constants; and what it costs."""

    items: tuple[Any, ...]
    is_tuple: bool
    cost: Cost

    def give(self) -> tuple[Any, list[Tensor]]:
        """The result anew, and the tensors in it."""
        made: list[Tensor] = []
        result: list[Any] = []
        for item in self.items:
            if type(item) is _Made:
                item = torch.empty_strided(item.shape, item.stride, dtype=item.dtype, device="meta")
                made.append(item)
            result.append(item)
        return (tuple(result) if self.is_tuple else result[0]), made


class SeenOperators:
    """Answers of operators that take tensors, change none, and return new ones."""

    def __init__(self) -> None:
        self._answers: dict[Any, Answer] = {}
        self._suitable: dict[Any, bool] = {}

    def key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an answer depends on; None if it depends on more than shapes."""
        suits = self._suitable.get(func)
        if suits is None:
            suits = self._suitable[func] = not (func.is_view or func._schema.is_mutable)
        if not suits:
            return None
        try:
            key = func, _keys(args), _keys(kwargs.items()) if kwargs else ()
            hash(key)
        except TypeError:
            return None
        return key

    def find(self, key: Any) -> Answer | None:
        """The answer of before."""
        return self._answers.get(key)

    def learn(
        self,
        key: Any,
        func: Any,
        args: Sequence[Any],
        result: Any,
        outputs: Sequence[Tensor],
    ) -> None:
        """Keep an answer, unless there is more to it than shapes."""
        items = result if isinstance(result, tuple) else (result,)
        if len(self._answers) >= LARGEST or not all(map(_is_plain, items)):
            return
        given = {_memory(one) for one in _tensors(args)}
        if any(_memory(one) in given for one in outputs):
            return
        made = tuple(
            _Made(tuple(item.shape), item.stride(), item.dtype)
            if isinstance(item, Tensor)
            else item
            for item in items
        )
        cost = cost_of(func, args, result, outputs)
        self._answers[key] = Answer(made, isinstance(result, tuple), cost)


SEEN = SeenOperators()
"""Those of this process: answers depend on nothing else."""


def _keys(values: Any) -> tuple[Any, ...]:
    return tuple([_key(value) for value in values])


def _key(value: Any) -> Any:
    if type(value) in _TENSORS:
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, (list, tuple)):
        return _keys(value)
    if isinstance(value, Tensor):
        raise TypeError("a tensor of tensors")
    return type(value), value


_TENSORS = frozenset({Tensor, torch.nn.Parameter})


def _is_plain(item: Any) -> bool:
    """Whether a result can be made again: a constant, or a tensor that fills its memory."""
    if item is None or isinstance(item, (int, float, bool)):
        return True
    if type(item) is not Tensor or not item.is_meta or item.storage_offset():
        return False
    strides = zip(item.shape, item.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in strides)
    needed = (last + 1) * item.itemsize if item.numel() else 0
    return item.untyped_storage().nbytes() == needed


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

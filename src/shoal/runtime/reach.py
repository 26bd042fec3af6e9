"""Which tensors inside a module's inputs or outputs a backward can reach."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The tensors of a value, as far as it can be looked into."""

    tensors: tuple[torch.Tensor, ...]
    is_opaque: bool
    """Whether something in it may hold tensors that were not found."""

    @classmethod
    def of(cls, value: Any) -> Reach:
        """Look into containers and dataclasses."""
        if isinstance(value, torch.Tensor):
            return cls(tensors=(value,), is_opaque=False)
        leaves = list(_leaves(value))
        return cls(
            tensors=tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)),
            is_opaque=any(not isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves),
        )

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """Those that a backward comes through: not leaves, and not without gradient mode."""
        if not torch.is_grad_enabled():
            return []
        return [tensor for tensor in self.tensors if tensor.requires_grad and not tensor.is_leaf]

    @property
    def has_leaf(self) -> bool:
        """Whether a backward ends in one of them, where no hook tells in time."""
        return torch.is_grad_enabled() and any(t.requires_grad and t.is_leaf for t in self.tensors)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replace the tensors of a value, in whatever it can be looked into; the rest stays."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in fields(value):
            new = map_tensors(function, getattr(value, field.name))
            object.__setattr__(result, field.name, new)
        return result
    if isinstance(value, PackedSequence):
        return value._replace(data=function(value.data))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, dict):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        if type(value) is dict:
            return items
        result = copy.copy(value)
        result.update(items)
        return result
    if isinstance(value, (list, tuple, set)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (torch.Tensor, *_PLAIN)):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple, Set)):
        for item in value:
            yield from _leaves(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _leaves(getattr(value, field.name))
    else:
        yield value

"""Which tensors inside a module's inputs or outputs a backward can reach."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch.nn.utils.rnn import PackedSequence

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)


class Reach:
    """The tensors of a value, as far as it can be looked into. Made twice per unit and step."""

    __slots__ = ("differentiable", "is_opaque", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor], is_opaque: bool) -> None:
        self.tensors = tensors
        self.is_opaque = is_opaque
        """Whether something in it may hold tensors that were not found."""
        self.differentiable: list[torch.Tensor] = []
        """Those that a backward comes through: not leaves, and not without gradient mode."""
        if torch.is_grad_enabled():
            self.differentiable = [t for t in tensors if t.requires_grad and not t.is_leaf]

    @classmethod
    def of(cls, value: Any) -> Reach:
        """Look into containers and dataclasses."""
        if isinstance(value, torch.Tensor):
            return cls((value,), False)
        leaves = list(_leaves(value))
        return cls(
            [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
            any(not isinstance(leaf, (torch.Tensor, *_PLAIN)) for leaf in leaves),
        )

    @classmethod
    def of_call(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reach:
        """Look into the arguments of a call, of which most have one tensor."""
        if len(args) == 1 and not kwargs:
            return cls.of(args[0])
        return cls.of((args, kwargs))


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
    if isinstance(value, tuple) and hasattr(value, "_make"):
        # Past its constructor, which may take something else.
        return cast(Any, value)._make(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        if type(value) is dict:
            return items
        result = copy.copy(value)
        result.update(items)
        return result
    if isinstance(value, list) and type(value) is not list:
        result = copy.copy(value)  # with its attributes
        result[:] = [map_tensors(function, item) for item in value]
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

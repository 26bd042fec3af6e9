"""Which tensors inside a module's inputs or outputs a backward can reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

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

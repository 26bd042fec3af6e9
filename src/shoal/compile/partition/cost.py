"""The cost of keeping a value in memory, and of computing it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from shoal._torch import operators, storage, symbols
from shoal.compile.node_kinds import tensors_of, value

SYMBOL_BYTES = 8
"""A Python integer that is kept, as good as free."""


def kept_bytes(node: fx.Node) -> int:
    """The memory that stays alive while a node's value is kept; of a view, all that it shows of."""
    return held_bytes(value(node))


def held_bytes(held: Any) -> int:
    """The memory behind a value: a tensor, several, or a number."""
    if isinstance(held, Tensor):
        own = symbols.num_bytes(held)
        if storage.storage_key(held) is None:
            return own
        whole = symbols.size_hint(held.untyped_storage().nbytes())
        # An expanded tensor shows more than is there. Whether a symbol is zero is not asked: that
        # would be a guard, and fails where the symbol depends on data.
        is_expanded = any(isinstance(one, int) and one == 0 for one in held.stride())
        return min(own, whole) if is_expanded else whole
    if isinstance(held, list | tuple):
        return sum(map(held_bytes, held))
    return SYMBOL_BYTES


def work(node: fx.Node) -> int:
    """About how much is computed, in floating-point operations; never nothing."""
    target = node.target
    if isinstance(target, operators.OpOverload):
        count = flop_registry.get(target.overloadpacket)
        if count is not None:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _sized)  # type: ignore[misc]
            return max(1, int(count(*args, **kwargs, out_val=_sized(node))))
    given = tensors_of([node])
    return max(1, sum(math.prod(map(symbols.size_hint, one.shape)) for one in given))


def _sized(node: fx.Node) -> Any:
    """A node's value with hints for symbolic sizes, for functions that read only sizes."""
    return _with_hints(value(node))


def _with_hints(held: Any) -> Any:
    if isinstance(held, Tensor):
        sizes = [symbols.size_hint(size) for size in held.shape]
        return torch.empty(sizes, dtype=held.dtype, device="meta")
    if isinstance(held, torch.SymInt):
        return symbols.size_hint(held)
    if isinstance(held, list | tuple):
        return type(held)(map(_with_hints, held))
    return held

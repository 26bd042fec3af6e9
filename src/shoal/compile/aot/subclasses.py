"""Tensor subclasses that wrap other tensors: how they are taken apart for a graph, and rebuilt.

Signatures, generated code and autograd see the outer tensors, graphs the inner tensors alone. A
value enters a graph as its inner tensors, which may be taken apart themselves. The symbols among
its sizes and strides follow, because inner tensors need not have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal._torch import subclasses, trees


@dataclass(frozen=True, slots=True)
class Fixed:
    """An attribute of a wrapper that is no tensor, such as the mesh of a distributed tensor."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """How to rebuild one tensor subclass from the values that a graph returns."""

    kind: type[Any]
    context: Any
    """The context that `__tensor_flatten__` returns besides the names of inner tensors."""
    inner: tuple[tuple[str, Wrapping | Fixed | None], ...]
    """The attributes in order; None for a plain tensor."""
    shape: tuple[Any, ...]
    """Sizes; None for a symbol, whose value the graph returns."""
    strides: tuple[Any, ...]
    """Strides; None for a symbol."""

    @property
    def num_symbols(self) -> int:
        """The number of symbols among the sizes and strides of the outermost tensor."""
        return sum(one is None for one in (*self.shape, *self.strides))


def num_flat(wrapping: Wrapping | Fixed | None, *, symbols: bool = True) -> int:
    """The number of values that a value is in a graph."""
    if not isinstance(wrapping, Wrapping):
        return 1 if wrapping is None else 0
    inner = sum(num_flat(one, symbols=symbols) for _, one in wrapping.inner)
    return inner + (wrapping.num_symbols if symbols else 0)


Wrapped = tuple[Wrapping | None, ...]
"""For each of several values, how it wraps other tensors; None if it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrappings:
    """Which of the values around the graphs of a function wrap other tensors."""

    inputs: Wrapped
    returned: Wrapped
    """The values that forward returns, without symbols."""
    tangents: Wrapped
    gradients: Wrapped = ()

    @property
    def any(self) -> bool:
        """Whether any value wraps others."""
        return any((*self.inputs, *self.returned, *self.tangents, *self.gradients))


def wrapping_of(value: Any) -> Wrapping | None:
    """How a value wraps other tensors; None if it does not."""
    if not subclasses.wraps_others(value):
        return None
    names, context = value.__tensor_flatten__()
    _check_context(value, context)
    parts = [(name, getattr(value, name)) for name in names]
    return Wrapping(
        kind=type(value),
        context=context,
        inner=tuple(
            (name, wrapping_of(part) if isinstance(part, Tensor) else Fixed(part))
            for name, part in parts
        ),
        shape=tuple(None if _is_symbol(one) else one for one in value.size()),
        strides=tuple(None if _is_symbol(one) else one for one in value.stride()),
    )


def kind_of(value: Any) -> Any:
    """The type of a tensor, with the contexts of subclasses: equal if one graph serves both."""
    if not subclasses.wraps_others(value):
        return type(value)
    names, context = value.__tensor_flatten__()
    try:
        hash(context)
    except TypeError:
        context = repr(context)
    parts = (getattr(value, name) for name in names)
    return (
        type(value),
        context,
        *(kind_of(part) if isinstance(part, Tensor) else part for part in parts),
    )


def wrappings_of(values: Iterable[Any]) -> Wrapped:
    """How each of several values wraps other tensors."""
    return tuple(wrapping_of(value) for value in values)


def _check_context(value: Tensor, context: Any) -> None:
    """Refuse symbols that are not in the shape; a distributed tensor's context has only those."""
    leaves = trees.tree_leaves(context)
    if any(_is_symbol(one) for one in leaves) and not isinstance(value, DTensor):
        raise NotImplementedError(
            f"the context of a tensor subclass, {type(value).__name__}.__tensor_flatten__()[1], "
            f"holds a size that is not known when the function is compiled; got {context!r}. Let "
            "its inner tensors show the size, or compile with dynamic=False."
        )


def _is_symbol(one: Any) -> bool:
    return isinstance(one, torch.SymInt) and not one.node.is_nested_int()


def flat(value: Any, *, symbols: bool = True) -> list[Any]:
    """A value as a graph sees it: inner tensors, then symbols."""
    if not subclasses.wraps_others(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    parts = (getattr(value, name) for name in names)
    found = [
        one for part in parts if isinstance(part, Tensor) for one in flat(part, symbols=symbols)
    ]
    if symbols:
        found += [one for one in (*value.size(), *value.stride()) if _is_symbol(one)]
    return found


def flat_all(values: Iterable[Any], *, symbols: bool = True) -> list[Any]:
    """Several values as a graph sees them."""
    return [one for value in values for one in flat(value, symbols=symbols)]


def rebuild(
    given: Sequence[Any],
    like: Sequence[Any],
    change: Callable[[Tensor], Tensor],
    *,
    symbols: bool = True,
) -> list[Any]:
    """Values like those in `like`, with `change(tensor)` for each `given` tensor inside."""
    made: list[Any] = []
    parts = iter(given)
    for one in like:
        own = list(islice(parts, len(flat(one, symbols=symbols))))
        # Symbols are inputs of the graph, but no part of the value that is rebuilt.
        tensors = map(change, [part for part in own if isinstance(part, Tensor)])
        made.append(
            subclasses.with_inner(one, lambda _, tensors=tensors: next(tensors))
            if isinstance(one, Tensor)
            else own[0]
        )
    return made


def places(wrapped: Wrapped, *, symbols: bool = True) -> list[range]:
    """For each value, its places among the values that a graph takes."""
    ends = accumulate((num_flat(one, symbols=symbols) for one in wrapped), initial=0)
    return [range(*pair) for pair in pairwise(ends)]


def as_traced(tangent: Any, wrapping: Wrapping | None) -> Any:
    """A gradient, coerced to the type that backward was traced for; refused if it cannot be."""
    wraps = subclasses.wraps_others(tangent)
    if wrapping is None:
        return _coerced(tangent, None, Tensor) if wraps else tangent
    if type(tangent) is not wrapping.kind or not wraps:
        tangent = _coerced(tangent, wrapping.context, wrapping.kind)
    elif wrapping.num_symbols:
        # Sizes in its context are symbols, which say nothing when compared.
        tangent = _coerced(tangent, wrapping.context, None, needed=False)
    elif tangent.__tensor_flatten__()[1] != wrapping.context:
        tangent = _coerced(tangent, wrapping.context, None)
    _check_inner(tangent, wrapping)
    return tangent


def _check_inner(tangent: Any, wrapping: Wrapping) -> None:
    """Refuse inner tensors of another type: only the outer tensor can be coerced."""
    for name, its in wrapping.inner:
        if isinstance(its, Fixed):
            continue
        inner = getattr(tangent, name)
        expected = Tensor if its is None else its.kind
        if (its is not None or subclasses.wraps_others(inner)) and type(inner) is not expected:
            raise _wrong_tangent(f"{expected.__name__} in its attribute {name!r}", tangent)
        if its is not None:
            _check_inner(inner, its)


def _coerced(tangent: Any, context: Any, kind: type[Any] | None, *, needed: bool = True) -> Any:
    coerce = getattr(tangent, "__coerce_same_metadata_as_tangent__", None)
    made = None
    if coerce is not None:
        made = coerce(context) if kind is None else coerce(context, kind)
    if made is None and needed:
        raise _wrong_tangent(f"{(kind or type(tangent)).__name__} with {context!r}", tangent)
    return tangent if made is None else made


def _wrong_tangent(expected: str, tangent: Any) -> RuntimeError:
    wraps = subclasses.wraps_others(tangent)
    got = f"{type(tangent).__name__} with {tangent.__tensor_flatten__()[1] if wraps else None!r}"
    # It begins as that of torch's own runtime: programs look for that.
    begin = (
        "\nDuring the backward, we encountered a tensor subclass where we guessed its\n"
        "metadata incorrectly.\n"
    )
    if type(tangent) is Tensor:
        return RuntimeError(
            f"{begin}Expected a {expected} tangent but got a plain Tensor. So it is where nothing "
            "of that type came to an output that requires a gradient: detach outputs that are not "
            "used, or make the gradient of the expected type."
        )
    return RuntimeError(
        f"{begin}A gradient was expected to be a {expected}; got {got}. Give "
        f"{type(tangent).__name__} a method __coerce_same_metadata_as_tangent__, or make the "
        "gradient of the expected type."
    )

"""Tensors that wrap other tensors: what they consist of.

Signatures, wrappers and autograd deal with the outer tensors; graphs see the inner ones alone. A
value enters a graph as its inner tensors, those of nested wrappers in their place, followed by the
symbols among its sizes and strides, which the inner tensors need not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal._torch import subclasses, trees


@dataclass(frozen=True, slots=True)
class Fixed:
    """Something in a wrapper that is no tensor, such as the mesh of a distributed one."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapping:
    """How to put one wrapper together from what a graph returns."""

    kind: type[Any]
    context: Any
    """What `__tensor_flatten__` tells besides the inner tensors."""
    inner: tuple[tuple[str, Wrapping | Fixed | None], ...]
    """Its attributes in order; None for those that are plain tensors."""
    shape: tuple[Any, ...]
    """Sizes, with None for those that the graph returns."""
    strides: tuple[Any, ...]

    @property
    def num_symbols(self) -> int:
        """How many sizes and strides of the outermost tensor the graph deals with."""
        return sum(one is None for one in (*self.shape, *self.strides))

    def num_flat(self, *, symbols: bool) -> int:
        """As how many values it enters a graph."""
        own = self.num_symbols if symbols else 0
        return own + sum(
            one.num_flat(symbols=symbols) if isinstance(one, Wrapping) else 1
            for _, one in self.inner
            if not isinstance(one, Fixed)
        )


Wrapped = tuple[Wrapping | None, ...]
"""For each of several values, how it wraps others; None for those that do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrappings:
    """Which of the values around the graphs of a function wrap others."""

    inputs: Wrapped
    returned: Wrapped
    """Of what forward returns, but for symbols."""
    tangents: Wrapped
    gradients: Wrapped = ()

    @property
    def any(self) -> bool:
        """Whether there is one at all."""
        lists = (self.inputs, self.returned, self.tangents, self.gradients)
        return any(one is not None for several in lists for one in several)


def wrapping_of(value: Any) -> Wrapping | None:
    """How a value wraps others; None if it does not."""
    if not subclasses.wraps_others(value):
        return None
    names, context = value.__tensor_flatten__()
    _check_context(value, context)
    inner = tuple((name, _inner_wrapping(getattr(value, name))) for name in names)
    return Wrapping(
        kind=type(value),
        context=context,
        inner=inner,
        shape=tuple(None if _is_symbol(one) else one for one in value.size()),
        strides=tuple(None if _is_symbol(one) else one for one in value.stride()),
    )


def kind_of(value: Any) -> Any:
    """What a graph is made for in the type of a tensor: equal for those that one graph serves."""
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
    """How each of several values wraps others."""
    return tuple(wrapping_of(value) for value in values)


def _inner_wrapping(value: Any) -> Wrapping | Fixed | None:
    return wrapping_of(value) if isinstance(value, Tensor) else Fixed(value)


def _check_context(value: Tensor, context: Any) -> None:
    """Refuse symbols that nobody could fill in; distributed tensors replace theirs by the shape."""
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
    """A value as graphs see it."""
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
    """Several values as graphs see them."""
    return [one for value in values for one in flat(value, symbols=symbols)]


def rebuild(
    given: Sequence[Any],
    like: Sequence[Any],
    change: Callable[[Tensor], Tensor],
    *,
    symbols: bool = True,
) -> list[Any]:
    """Values like others, with `change` of the tensors that graphs see in place of theirs."""
    made: list[Any] = []
    start = 0
    for one in like:
        stop = start + len(flat(one, symbols=symbols))
        made.append(_rebuilt(one, given[start:stop], change))
        start = stop
    return made


def _rebuilt(like: Any, parts: Sequence[Any], change: Callable[[Tensor], Tensor]) -> Any:
    if not subclasses.wraps_others(like):
        return change(parts[0]) if isinstance(parts[0], Tensor) else parts[0]
    # Nothing is made of symbols here: they only have to be known to the graph.
    tensors = iter([one for one in parts if isinstance(one, Tensor)])
    return subclasses.with_inner(like, lambda _: change(next(tensors)))


def places(wrapped: Wrapped, *, symbols: bool = True) -> list[range]:
    """For each value, where it is among those that a graph takes."""
    found: list[range] = []
    start = 0
    for one in wrapped:
        count = 1 if one is None else one.num_flat(symbols=symbols)
        found.append(range(start, start + count))
        start += count
    return found


def as_traced(tangent: Any, wrapping: Wrapping | None) -> Any:
    """A gradient as backward was traced for it; refused if its class cannot say how."""
    names_context = tangent.__tensor_flatten__() if subclasses.wraps_others(tangent) else None
    if wrapping is None:
        if names_context is None:
            return tangent
        return _coerced(tangent, None, Tensor)
    if type(tangent) is not wrapping.kind or names_context is None:
        tangent = _coerced(tangent, wrapping.context, wrapping.kind)
    elif wrapping.num_symbols:
        # Sizes in its context are symbols, which say nothing when compared.
        tangent = _coerced(tangent, wrapping.context, None, needed=False)
    elif names_context[1] != wrapping.context:
        tangent = _coerced(tangent, wrapping.context, None)
    for name, inner in wrapping.inner:
        if not isinstance(inner, Fixed):
            _check_inner(tangent, name, inner)
    return tangent


def _check_inner(tangent: Any, name: str, wrapping: Wrapping | None) -> None:
    """A wrapper can be told to change, what it wraps cannot."""
    inner = getattr(tangent, name)
    expected = Tensor if wrapping is None else wrapping.kind
    if (wrapping is not None or subclasses.wraps_others(inner)) and type(inner) is not expected:
        raise _wrong_tangent(f"{expected.__name__} in its attribute {name!r}", tangent)
    for deeper, its in wrapping.inner if wrapping is not None else ():
        if not isinstance(its, Fixed):
            _check_inner(inner, deeper, its)


def _coerced(tangent: Any, context: Any, kind: type[Any] | None, *, needed: bool = True) -> Any:
    coerce = getattr(tangent, "__coerce_same_metadata_as_tangent__", None)
    made = None
    if coerce is not None:
        made = coerce(context) if kind is None else coerce(context, kind)
    if made is None and not needed:
        return tangent
    if made is None:
        name = (kind or type(tangent)).__name__
        raise _wrong_tangent(f"{name} with {context!r}", tangent)
    return made


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

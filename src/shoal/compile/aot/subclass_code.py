"""Generate lines that take tensor subclasses apart, or rebuild them from a graph's results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch

from shoal.compile.aot.code_writer import CodeWriter, listed
from shoal.compile.aot.subclasses import Fixed, Wrapped, Wrapping, num_flat


def taken_apart(name: str, wrapping: Wrapping | None, *, symbols: bool = True) -> list[str]:
    """Expressions for the values that a value is in a graph."""
    if wrapping is None:
        return [name]
    found: list[str] = []
    for attribute, inner in wrapping.inner:
        if not isinstance(inner, Fixed):
            found += taken_apart(f"{name}.{attribute}", inner, symbols=symbols)
    if symbols:
        found += [f"{name}.size({d})" for d, one in enumerate(wrapping.shape) if one is None]
        found += [f"{name}.stride({d})" for d, one in enumerate(wrapping.strides) if one is None]
    return found


def all_apart(names: Sequence[str], wrapped: Wrapped) -> list[str]:
    """Expressions for the values that several values are in a graph."""
    return [one for name, how in zip(names, wrapped, strict=True) for one in taken_apart(name, how)]


def names_for(name: str, wrapping: Wrapping | None, *, symbols: bool = True) -> list[str]:
    """Names for the values that a graph returns for a value."""
    if wrapping is None:
        return [name]
    return [f"{name}_{number}" for number in range(num_flat(wrapping, symbols=symbols))]


def all_names(names: Sequence[str], wrapped: Wrapped) -> list[str]:
    """Names for the values that a graph returns for several; those beyond `wrapped` are plain."""
    pairs = zip_longest(names, wrapped)
    return [one for name, how in pairs for one in names_for(name, how)]


def put_together(code: CodeWriter, names: Sequence[str], wrapped: Wrapped) -> None:
    """Write the lines that rebuild tensor subclasses from the values that a graph returned."""
    for name, wrapping in zip(names, wrapped, strict=False):
        if wrapping is not None:
            code.line(f"{name} = {_wrapper(code, iter(names_for(name, wrapping)), wrapping)}")


def _wrapper(code: CodeWriter, names: Iterator[str], wrapping: Wrapping) -> str:
    items: list[str] = []
    for attribute, inner in wrapping.inner:
        if isinstance(inner, Fixed):
            value = code.literal(inner.value)
        else:
            value = next(names) if inner is None else _wrapper(code, names, inner)
        items.append(f"{attribute!r}: {value}")
    make = code.name("unflatten", wrapping.kind.__tensor_unflatten__)
    context = "None"
    if wrapping.context is not None:
        context = code.name("context", wrapping.context)
    shape = _sizes(code, names, wrapping.shape, torch.Size)
    strides = _sizes(code, names, wrapping.strides, tuple)
    return f"{make}({{{', '.join(items)}}}, {context}, {shape}, {strides})"


def _sizes(code: CodeWriter, names: Iterator[str], sizes: Sequence[int | None], kind: type) -> str:
    if None not in sizes:
        return code.name("sizes", kind(sizes))
    items = listed(next(names) if one is None else str(one) for one in sizes)
    return f"{code.name('size', kind)}(({items}))"

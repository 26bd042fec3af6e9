"""The values that the Python of a step read beside its arguments, to compare and to restore.

A captured step does not run Python again, so all that its code can see has to be as it was.
`reachable.py` finds the objects; `Reads` keeps their values as they were at one moment.
"""

from __future__ import annotations

import math
import os
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import torch

from shoal.compile.step.reachable import Found, Walk, joined, shown

_MISSING = object()


class Reads:
    """The values of all that the code under some roots may read, as they were at one moment."""

    def __init__(self, roots: Mapping[str, object], optimizer: torch.optim.Optimizer) -> None:
        walk = Walk(roots, optimizer)
        self._columns: list[_Column] = [
            *(_Attributes(keys, found) for keys, found in walk.attributes.items()),
            *(_Slots(keys, found) for keys, found in walk.slots.items()),
            _Column(type, walk.objects),
            _Column(len, [*walk.wholes, *((path, vars(cls)) for path, cls in walk.classes)]),
            _Cells(attrgetter("cell_contents"), walk.cells),
            _Column(attrgetter("__code__", "__defaults__", "__kwdefaults__"), walk.functions),
            _Variables(methodcaller("get", _MISSING), walk.variables),
            _Containers([one for one in walk.containers if one[1]]),
        ]
        if walk.reads_environment:
            self._columns.append(_Column(dict, [("os.environ", os.environ)]))
        self._classes = [(cls, dict(vars(cls))) for _, cls in walk.classes]
        self._random = [_RandomState(path, one) for path, one in walk.generators]
        self._caches = [(cache, cache.cache_info().misses) for cache in walk.caches]
        self.unrepeatable = next(iter(walk.iterators), None)
        """Where the code may reach an iterator: nobody knows how far it is, nor can go back."""
        self._empty = [one for _, one in walk.containers if not one]
        self._emptied = [one for one in walk.containers if not one[1]]
        self._wholes = [(held, dict(held)) for _, held in walk.wholes]
        self.loose = walk.loose
        """Tensors that are neither parameters nor buffers: where, in what, by which key."""

    def are_same(self) -> bool:
        """Whether all of it is as it was. Called in every step: its loops are C's."""
        try:
            return (
                all(column.is_same() for column in self._columns)
                and not any(self._empty)
                and all(item_at(held, key) is one for _, held, key, one in self.loose)
            )
        except Exception:
            return False  # what cannot be read or compared any more is not the same

    def change(self) -> str | None:
        """The first thing that is not as it was, in words; None if there is none."""
        if self.are_same():
            return None
        words = chain.from_iterable(column.changes() for column in self._columns)
        filled = (f"{path} was empty and is {shown(one)}" for path, one in self._emptied if one)
        return next(chain(words, filled), "a tensor was replaced by another one")

    def drawn(self) -> str | None:
        """Which of Python's random states is not as it was, in words; None if all are."""
        return next((state.path for state in self._random if not state.is_same()), None)

    def restore(self) -> None:
        """Undo what a trace did to all of it, but for objects that were given another class."""
        for state in self._random:
            state.restore()
        for cls, before in self._classes:
            _undo(vars(cls), before, partial(setattr, cls), partial(delattr, cls))
        for cache, num_misses in self._caches:
            if cache.cache_info().misses != num_misses:
                cache.cache_clear()  # it may hold fake tensors
        for held, before in self._wholes:
            _undo(held, before, held.__setitem__, held.__delitem__)
        for one in self._empty:
            one.clear()
        for column in self._columns:
            column.restore()


class _Column:
    """Values that one function reads from many objects."""

    def __init__(self, read: Callable[[Any], Any], found: Found) -> None:
        self.read = read
        self.paths = [path for path, _ in found]
        self.objects = [one for _, one in found]
        self.values = list(map(read, self.objects))
        self.types = list(map(type, self.parts_of(self.values)))
        self.zeros = _Zeros(self.parts_of(self.values))

    def is_same(self) -> bool:
        now = list(map(self.read, self.objects))
        # 1, 1.0 and True are equal, and so are 0.0 and -0.0, but not the same to a program.
        return (
            now == self.values
            and list(map(type, self.parts_of(now))) == self.types
            and self.zeros.are_same(self.parts_of(now))
        )

    def parts_of(self, values: list[Any]) -> Iterable[Any]:
        """The values one by one, where `read` gives several of each object."""
        return values

    def changes(self) -> Iterator[str]:
        for path, one, before in zip(self.paths, self.objects, self.values, strict=True):
            try:
                now = self.read(one)
            except (AttributeError, KeyError, ValueError):
                yield f"{path} lost something that it had"
                continue
            if not _are_same(now, before):
                yield self.words(path, before, now)

    def words(self, path: str, before: Any, now: Any) -> str:
        if self.read is len:
            return f"{path or 'the model'} had {before} attributes or entries and has {now}"
        return f"{path} was {shown(before)} and is {shown(now)}"

    def restore(self) -> None:
        """Undo what a trace did to the values."""
        for one, before in zip(self.objects, self.values, strict=True):
            self.write(one, before)

    def write(self, one: Any, before: Any) -> None:
        """Put a value back, where that is not done as a part of another."""


class _Zeros:
    """The signs of the zeros among some values: 1 / 0.0 is not 1 / -0.0."""

    def __init__(self, values: Iterable[Any]) -> None:
        signs = list(map(_sign_of_zero, values))
        self._at = [at for at, sign in enumerate(signs) if sign is not None]
        self._signs = [signs[at] for at in self._at]

    def are_same(self, values: Iterable[Any]) -> bool:
        if not self._at:
            return True
        now = list(values)
        return [_sign_of_zero(now[at]) for at in self._at] == self._signs


def _sign_of_zero(value: object) -> tuple[float, ...] | None:
    """The sign of a number that is zero, of each part of a complex one; None for all else."""
    if type(value) is float:
        return None if value else (math.copysign(1.0, value),)
    if type(value) is complex and not (value.real and value.imag):
        return math.copysign(1.0, value.real), math.copysign(1.0, value.imag)
    return None


class _Cells(_Column):
    """Variables of closures."""

    def write(self, one: Any, before: Any) -> None:
        one.cell_contents = before


class _Variables(_Column):
    """Context variables."""

    def write(self, one: Any, before: Any) -> None:
        if one.get(_MISSING) is not before and before is not _MISSING:
            one.set(before)


class _Attributes(_Column):
    """Attributes of the same names, of many objects."""

    getter: Callable[..., Callable[[Any], Any]] = itemgetter

    def __init__(self, keys: tuple[str, ...], found: Found) -> None:
        self._keys = keys
        super().__init__(self.getter(*keys), found)

    def parts_of(self, values: list[Any]) -> Iterable[Any]:
        return values if len(self._keys) == 1 else chain.from_iterable(values)

    def items(self, *values: Any) -> Iterable[tuple[Any, ...]]:
        """Each name, with what some values of one object have for it."""
        several = ([one] for one in values) if len(self._keys) == 1 else values
        return zip(self._keys, *several, strict=True)

    def words(self, path: str, before: Any, now: Any) -> str:
        for key, old, new in self.items(before, now):
            if not _are_same(old, new):
                return f"{joined(path, key)} was {shown(old)} and is {shown(new)}"
        return f"{path} changed"

    def write(self, one: Any, before: Any) -> None:
        if isinstance(one, dict):
            one.update(self.items(before))


class _Slots(_Attributes):
    """Attributes of objects that have slots for them."""

    getter = attrgetter

    def write(self, one: Any, before: Any) -> None:
        for key, value in self.items(before):
            if getattr(one, key, _MISSING) is not value:
                object.__setattr__(one, key, value)  # frozen ones too


class _Containers(_Column):
    """Containers that are compared with copies of themselves."""

    def __init__(self, found: Found) -> None:
        super().__init__(_copy_of, found)
        self._dicts = [one for one in self.objects if isinstance(one, dict)]
        self._lists = [one for one in self.objects if isinstance(one, (list, deque))]
        self._details = self._details_now()

    def is_same(self) -> bool:
        return self.objects == self.values and self._details_now() == self._details

    def _details_now(self) -> tuple[list[Any], ...]:
        """What equality does not tell: orders of keys, types of equal numbers, signs of zeros."""
        items = list(chain.from_iterable(chain(map(dict.values, self._dicts), self._lists)))
        return (
            list(map(tuple, self._dicts)),
            list(map(type, items)),
            list(map(_sign_of_zero, items)),
        )

    def write(self, one: Any, before: Any) -> None:
        if not _are_same(_copy_of(one), before):
            one.clear()
            one.extend(before) if isinstance(one, (list, deque)) else one.update(before)


class _RandomState:
    """The state of a random generator of Python's or numpy's, as it was at one moment."""

    def __init__(self, path: str, generator: Any) -> None:
        self.path = path
        self._read, self._write = _state_of(generator)
        self._before = self._read()
        self._words = repr(self._before)

    def is_same(self) -> bool:
        return repr(self._read()) == self._words  # tuples of numbers, with arrays among them

    def restore(self) -> None:
        if not self.is_same():
            self._write(self._before)


def _state_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """Functions that read and write the state of a random generator."""
    if hasattr(generator, "getstate"):
        return generator.getstate, generator.setstate
    if hasattr(generator, "get_state"):
        return generator.get_state, generator.set_state
    bits = generator.bit_generator
    return (lambda: bits.state), (lambda state: setattr(bits, "state", state))


def _undo(
    held: Any, before: dict[str, Any], put: Callable[..., None], remove: Callable[..., None]
) -> None:
    """Give a namespace the entries that it had before."""
    for key in held.keys() - before.keys():
        remove(key)
    for key, one in before.items():
        if held.get(key, _MISSING) is not one:
            put(key, one)


def item_at(place: Any, key: Any) -> Any:
    """What a closure's cell, or a container under a key, holds."""
    return place.cell_contents if isinstance(place, types.CellType) else place[key]


def _copy_of(one: Any) -> Any:
    return next(kind for kind in (list, dict, set, deque) if isinstance(one, kind))(one)


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or _sign_of_zero(one) != _sign_of_zero(other):
        return False
    try:
        if isinstance(one, (tuple, list, deque)):
            return len(one) == len(other) and all(map(_are_same, one, other))
        if isinstance(one, dict):
            return _are_same(list(one.items()), list(other.items()))
        return bool(one == other)
    except Exception:
        return False  # tensors and arrays: only the very same one is the same

"""What the Python of a step may read beside its arguments: attributes, closures, globals.

A captured step does not run Python again, so all that its code can see has to be as it was. The
code itself says which names it uses: `forward`, and the methods, functions and hooks that these
names lead to. Attributes of these names are watched, on every object that the code can reach.

Not watched: globals of torch and of installed packages, objects with slots, elements of arrays.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    str(Path(__file__).parents[2]),
    "<frozen",
)
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, Tensor, type, torch.dtype),
    *(torch.device, torch.Size, torch.layout, torch.memory_format, torch.Generator, range, slice),
)
_OPAQUE = frozenset({"torch", "shoal", "logging", "threading", "_thread", "weakref", "numpy"})
"""Packages whose objects are not looked into, but for modules of torch's."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_WATCHED_DICTS = (
    *_HOOKS,
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks_with_kwargs", "_modules"),
)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_flat_weights", "_flat_weight_refs"}
"""What torch keeps on every module, and on recurrent ones, which look after these lists."""
_NOT_CALLED = frozenset({"__init__", "__new__", "__setstate__", "__getstate__", "__repr__"})

Found = list[tuple[str, Any]]
"""Objects, each with the words for where it is."""


class Reads:
    """The values of all that the code under some roots may read, as they were at one moment."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        walk = _Walk(roots)
        self._columns: list[_Column] = [
            *(_Attributes(keys, found) for keys, found in walk.attributes.items()),
            _Column(type, walk.objects),
            _Column(len, walk.wholes),
            _Column(attrgetter("cell_contents"), walk.cells),
            _Containers([one for one in walk.containers if one[1]]),
        ]
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
                and all(_item(held, key) is one for _, held, key, one in self.loose)
            )
        except Exception:
            return False  # what cannot be read or compared any more is not the same

    def change(self) -> str | None:
        """The first thing that is not as it was, in words; None if there is none."""
        if self.are_same():
            return None
        words = chain.from_iterable(column.changes() for column in self._columns)
        filled = (f"{path} was empty and is {_shown(one)}" for path, one in self._emptied if one)
        return next(chain(words, filled), "a tensor was replaced by another one")

    def restore(self) -> None:
        """Undo what a trace did to all of it, but for changes of classes."""
        for held, before in self._wholes:
            for key in [key for key in held if key not in before]:
                del held[key]
            held.update((key, one) for key, one in before.items() if held.get(key) is not one)
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

    def is_same(self) -> bool:
        return list(map(self.read, self.objects)) == self.values

    def changes(self) -> Iterator[str]:
        for path, one, before in zip(self.paths, self.objects, self.values, strict=True):
            try:
                now = self.read(one)
            except (KeyError, ValueError):
                yield f"{path} lost something that it had"
                continue
            if not _are_equal(now, before):
                yield self.words(path, before, now)

    def words(self, path: str, before: Any, now: Any) -> str:
        if self.read is len:
            return f"{path or 'the model'} had {before} attributes or entries and has {now}"
        return f"{path} was {_shown(before)} and is {_shown(now)}"

    def restore(self) -> None:
        if isinstance(self.read, attrgetter):
            for cell, before in zip(self.objects, self.values, strict=True):
                cell.cell_contents = before


class _Attributes(_Column):
    """Attributes of the same names, of many objects."""

    def __init__(self, keys: tuple[str, ...], found: Found) -> None:
        self._keys = keys
        super().__init__(itemgetter(*keys), found)

    def words(self, path: str, before: Any, now: Any) -> str:
        pairs = [(before, now)] if len(self._keys) == 1 else zip(before, now, strict=True)
        for key, (old, new) in zip(self._keys, pairs, strict=True):
            if not _are_equal(old, new):
                return f"{_joined(path, key)} was {_shown(old)} and is {_shown(new)}"
        return f"{path} changed"

    def restore(self) -> None:
        for held, values in zip(self.objects, self.values, strict=True):
            if isinstance(held, dict):
                one_by_one = (values,) if len(self._keys) == 1 else values
                held.update(zip(self._keys, one_by_one, strict=True))


class _Containers(_Column):
    """Containers that are compared with copies of themselves."""

    def __init__(self, found: Found) -> None:
        super().__init__(_copy_of, found)

    def is_same(self) -> bool:
        return self.objects == self.values

    def restore(self) -> None:
        for one, before in zip(self.objects, self.values, strict=True):
            if not _are_equal(one, before):
                one.clear()
                one.extend(before) if isinstance(one, (list, deque)) else one.update(before)


class _Walk:
    """Everything that code under some roots can reach, and what of it to watch."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._names: set[str] = {"forward"}
        self._reads_any = False
        num_names = 0
        while num_names != len(self._names):  # code that was found last may name what others have
            num_names = len(self._names)
            self._seen: dict[int, object] = {}
            self.attributes: dict[tuple[str, ...], Found] = {}
            self.wholes: Found = []
            self.containers: Found = []
            self.cells: Found = []
            self.objects: Found = []
            self.loose: list[tuple[str, Any, Any, Tensor]] = []
            for path, root in roots.items():
                self._visit(path, root)

    def _visit(self, path: str, one: object) -> None:
        if isinstance(one, _PLAIN) or self._has_seen(one):
            return
        match one:
            case nn.Module():
                self._visit_module(path, one)
            case list() | dict() | set() | deque() | tuple() | frozenset():
                self._visit_items(path, one)
            case types.FunctionType():
                self._visit_function(path, one)
            case types.MethodType():
                self._visit(path, one.__func__)
                self._visit(f"the object of {path}", one.__self__)
            case functools.partial():
                self._visit(path, (one.func, one.args, one.keywords))
            case types.ModuleType():
                if not _is_of_library(getattr(one, "__file__", None)):
                    self._watch(one.__name__, vars(one), self._names)
            case _:
                self._visit_object(path, one)

    def _has_seen(self, one: object) -> bool:
        if id(one) in self._seen:
            return True
        self._seen[id(one)] = one  # alive, so that nothing else gets its id
        return False

    def _visit_module(self, path: str, module: nn.Module) -> None:
        held = vars(module)
        self._visit_class(path, type(module), module)
        for name in ("_parameters", "_buffers"):
            self.wholes.append((_joined(path, name), held[name]))
        for name in _WATCHED_DICTS:
            self.containers.append((_joined(path, name), held[name]))
        for name in _HOOKS:
            for hook in held[name].values():
                self._visit(f"a hook of {path or 'the model'}", hook)
        self.wholes.append((path, held))
        names = self._read_of(held, type(module)) - _OF_TORCH
        self._watch(path, held, {"training", *(n for n in names if not n.startswith("_shoal"))})
        for name, child in held["_modules"].items():
            self._visit(_joined(path, name), child)

    def _visit_object(self, path: str, one: object) -> None:
        held = getattr(one, "__dict__", None)
        if isinstance(held, dict) and type(one).__module__.partition(".")[0] not in _OPAQUE:
            self._visit_class(path, type(one), one)
            self.wholes.append((path, held))
            self._watch(path, held, self._read_of(held, type(one)))

    def _visit_class(self, path: str, cls: type, one: object) -> None:
        """Watch an object's class, and read the methods of it that names lead to."""
        self.objects.append((f"the class of {path or 'the model'}", one))
        for base in cls.__mro__:
            if base is nn.Module or base is object:
                return
            if self._has_seen(base):
                continue
            for name, member in vars(base).items():
                if name in self._names or (name[:2] == "__" and name not in _NOT_CALLED):
                    for function in _functions_in(member):
                        self._visit(f"{base.__qualname__}.{name}", function)
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if not _is_of_library(file):
                self._watch(base.__qualname__, cast(Any, vars(base)), self._names)

    def _visit_items(self, path: str, one: Any) -> None:
        if isinstance(one, (list, dict, set, deque)):
            self.containers.append((path, one))
        for key, item in one.items() if isinstance(one, dict) else enumerate(one):
            self._visit_item(f"{path}[{_shown(key)}]", one, key, item)

    def _visit_function(self, path: str, function: types.FunctionType) -> None:
        codes = list(_codes_in(function.__code__))
        names = set(chain.from_iterable(code.co_names for code in codes))
        is_of_library = _is_of_library(function.__code__.co_filename)
        if "getattr" in names:
            self._reads_any |= not is_of_library
            names.update(filter(_is_name, chain.from_iterable(code.co_consts for code in codes)))
        self._names |= names
        if is_of_library:
            return
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if not self._has_seen(cell) and (content := _content_of(cell)) is not cell:
                self.cells.append((f"{name}, in the closure of {path},", cell))
                self._visit_item(f"{name}, in the closure of {path}", cell, None, content)
        self._visit(f"the defaults of {path}", function.__defaults__)
        self._visit(f"the defaults of {path}", function.__kwdefaults__)
        self._watch(function.__module__, function.__globals__, names)

    def _visit_item(self, path: str, place: Any, key: Any, one: object) -> None:
        if isinstance(one, Tensor) and not isinstance(place, (tuple, set, frozenset)):
            self.loose.append((path, place, key, one))
        self._visit(path, one)

    def _read_of(self, held: Mapping[str, Any], cls: type) -> set[str]:
        """The attributes of an object that code may read."""
        looks_up = hasattr(cls, "__getattr__") and not issubclass(cls, nn.Module)
        return set(held) if self._reads_any or looks_up else self._names.intersection(held)

    def _watch(self, path: str, held: dict[str, Any], names: set[str]) -> None:
        keys = tuple(sorted(name for name in names if name in held))
        if keys:
            self.attributes.setdefault(keys, []).append((path, held))
        for key in keys:
            self._visit_item(_joined(path, key), held, key, held[key])


def _is_of_library(file: str | None) -> bool:
    """Whether code is installed, and not the program's own; builtins have no file."""
    return file is None or file.startswith(_LIBRARIES)


def _functions_in(member: object) -> Sequence[object]:
    match member:
        case staticmethod() | classmethod():
            return [member.__func__]
        case property():
            return [one for one in (member.fget, member.fset) if one is not None]
    return [member] if isinstance(member, types.FunctionType) else []


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of those that are made inside it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes_in(one)


def _is_name(one: object) -> bool:
    return isinstance(one, str) and one.isidentifier()


def _content_of(cell: Any) -> Any:
    """What a cell holds; itself if that is nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def _item(place: Any, key: Any) -> Any:
    return place.cell_contents if isinstance(place, types.CellType) else place[key]


def _copy_of(one: Any) -> Any:
    return next(kind for kind in (list, dict, set, deque) if isinstance(one, kind))(one)


def _are_equal(one: object, other: object) -> bool:
    try:
        return one is other or bool(one == other)
    except Exception:
        return False  # tensors and arrays: only the very same one is the same


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(one: object) -> str:
    if isinstance(one, Tensor):
        return f"a tensor of shape {tuple(one.shape)}"
    text = repr(one)
    return text if len(text) <= 80 else f"{text[:77]}..."

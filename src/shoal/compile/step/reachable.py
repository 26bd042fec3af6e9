"""Find the objects that the Python of a step may read: attributes, closures, globals.

The code itself says which names it uses: `forward`, and the methods, functions, classes and hooks
that these names lead to. Attributes of these names are compared, on every object that the code can
reach.

Not compared: globals of torch and of installed packages, elements of arrays, clocks and files.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import random
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from itertools import chain
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from shoal.compile.step.step_data import CONSTANTS

_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")},
    str(Path(__file__).parents[2]),
    str(Path(torch.__file__).parent),
    "<frozen",
)
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, also of a user's own ones and of those that a path file names."""
_PLAIN = (*CONSTANTS, Tensor, torch.Generator)
_OPAQUE = frozenset({"torch", "shoal", "logging", "threading", "_thread", "weakref", "numpy"})
"""Packages whose objects are not looked into, but for modules of torch's."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_COMPARED_DICTS = (
    *_HOOKS,
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks_with_kwargs", "_modules"),
)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"} | {"_flat_weights", "_flat_weight_refs"}
"""What torch keeps on every module, and on recurrent ones, which look after these lists."""
_NOT_CALLED = frozenset({"__init__", "__new__", "__setstate__", "__getstate__", "__repr__"})
_CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
_OF_FUNCTIONS = ("forward", "setup_context", "backward", "jvp", "vjp", "vmap")
"""What autograd calls of a `torch.autograd.Function` of which code names `apply` alone."""
_OF_OPTIMIZERS = frozenset(
    {
        *("defaults", "param_groups", "state", "step"),
        *("_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name"),
    }
)
"""What torch keeps on every optimizer; groups, state and methods are compared elsewhere."""
_BY_ANY_NAME = frozenset({"getattr", "vars", "__dict__", "attrgetter", "methodcaller"})
"""Names in code that reads attributes by names that it computes."""
Found = list[tuple[str, Any]]
"""Objects, each with the words for where it is."""


class Walk:
    """Everything that code under some roots can reach, and what of it to compare."""

    def __init__(self, roots: Mapping[str, object], optimizer: torch.optim.Optimizer) -> None:
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
            self.slots: dict[tuple[str, ...], Found] = {}
            self.classes: Found = []
            self.functions: Found = []
            self.variables: Found = []
            self.generators: Found = _shared_generators()
            self.iterators: list[str] = []
            self.caches: list[Any] = []
            self.reads_environment = False
            self.loose: list[tuple[str, Any, Any, Tensor]] = []
            self._named_classes: set[type] = set()
            for path, root in roots.items():
                self._visit(path, root)
            self._visit_optimizer(optimizer)

    def _visit(self, path: str, one: object) -> None:
        if isinstance(one, type):
            self._visit_named_class(one)
            return
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
                    self._compare(one.__name__, vars(one), self._names)
            case attrgetter() | methodcaller():
                self._names.update(chain.from_iterable(map(_names_in, one.__reduce__()[1])))
            case functools._lru_cache_wrapper():
                self.caches.append(one)
                self._visit(path, one.__wrapped__)
            case ContextVar():
                self.variables.append((path, one))
            case _ if _is_generator(one):
                self.generators.append((path, one))
            case Iterator() if type(one).__module__ in ("builtins", "itertools"):
                self.iterators.append(path)
            case _:
                self._visit_object(path, one)

    def _has_seen(self, one: object) -> bool:
        if id(one) in self._seen:
            return True
        self._seen[id(one)] = one  # alive, so that nothing else gets its id
        return False

    def _visit_module(self, path: str, module: nn.Module) -> None:
        held = vars(module)
        self._visit_class(path, module)
        for name in ("_parameters", "_buffers"):
            self.wholes.append((joined(path, name), held[name]))
        for name in _COMPARED_DICTS:
            self.containers.append((joined(path, name), held[name]))
        for name in _HOOKS:
            for hook in held[name].values():
                self._visit(f"a hook of {path or 'the model'}", hook)
        self.wholes.append((path, held))
        names = self._read_of(held, type(module)) - _OF_TORCH
        self._compare(path, held, {"training", *(n for n in names if not n.startswith("_shoal"))})
        for name, child in held["_modules"].items():
            self._visit(joined(path, name), child)

    def _visit_object(self, path: str, one: object) -> None:
        kind, held = type(one), getattr(one, "__dict__", None)
        slots = [name for name in _slots_of(kind) if hasattr(one, name)]
        is_opaque = kind.__module__.partition(".")[0] in _OPAQUE
        if is_opaque and not isinstance(one, threading.local):
            return
        if slots or isinstance(held, dict):
            self._visit_class(path, one)
        if isinstance(held, dict):
            self.wholes.append((path, held))
            self._compare(path, held, self._read_of(held, kind))
        keys = tuple(name for name in slots if self._reads_any or name in self._names)
        if keys:
            self.slots.setdefault(keys, []).append((path, one))
        for key in keys:
            self._visit(joined(path, key), getattr(one, key))

    def _visit_optimizer(self, one: torch.optim.Optimizer) -> None:
        """Visit what an optimizer that is not torch's reads beside its groups and state."""
        kind, held = type(one), vars(one)
        if kind.__module__.partition(".")[0] in _OPAQUE:
            return
        self._visit_class("the optimizer", one)
        self._visit(f"{kind.__qualname__}.step", vars(kind).get("step"))
        names = self._read_of(held, kind) - _OF_OPTIMIZERS
        self._compare("optimizer", held, {n for n in names if not n.startswith("_optimizer_")})

    def _visit_named_class(self, cls: type) -> None:
        """Visit a class that code names: it reads from it, or makes objects of it."""
        if cls in self._named_classes:
            return
        self._named_classes.add(cls)
        for base in cls.__mro__:
            if _is_of_library(_file_of(base)):
                continue
            called = _OF_FUNCTIONS if issubclass(base, torch.autograd.Function) else _CONSTRUCTORS
            for name in called:
                for function in _functions_in(vars(base).get(name)):
                    self._visit(f"{base.__qualname__}.{name}", function)
            self._visit_bases(base)

    def _visit_class(self, path: str, one: object) -> None:
        """Compare an object's class, and read the methods of it that names lead to."""
        self.objects.append((f"the class of {path or 'the model'}", one))
        self._visit_bases(type(one))

    def _visit_bases(self, cls: type) -> None:
        for base in cls.__mro__:
            if base is nn.Module or base is object:
                return
            if self._has_seen(base):
                continue
            for name, member in vars(base).items():
                if name in self._names or (name[:2] == "__" and name not in _NOT_CALLED):
                    for function in _functions_in(member):
                        self._visit(f"{base.__qualname__}.{name}", function)
            if not _is_of_library(_file_of(base)):
                self.classes.append((base.__qualname__, base))
                self._compare(base.__qualname__, cast(Any, vars(base)), self._names)

    def _visit_items(self, path: str, one: Any) -> None:
        if isinstance(one, (list, dict, set, deque)):
            self.containers.append((path, one))
        for key, item in one.items() if isinstance(one, dict) else enumerate(one):
            self._visit_item(f"{path}[{shown(key)}]", one, key, item)

    def _visit_function(self, path: str, function: types.FunctionType) -> None:
        codes = list(_codes_in(function.__code__))
        names = set(chain.from_iterable(code.co_names for code in codes))
        is_of_library = _is_of_library(function.__code__.co_filename)
        if not names.isdisjoint(_BY_ANY_NAME):
            self._reads_any |= not is_of_library
            constants = chain.from_iterable(code.co_consts for code in codes)
            names.update(one for one in constants if isinstance(one, str) and one.isidentifier())
        self._names |= names
        self._visit(path, vars(function).get("__wrapped__"))  # by decorators such as no_grad()
        if is_of_library:
            return
        self.functions.append((path, function))
        self.reads_environment |= not names.isdisjoint(("environ", "getenv"))
        for module in chain.from_iterable(_imported_by(code, function) for code in codes):
            self._visit(module.__name__, module)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if not self._has_seen(cell) and (content := _content_of(cell)) is not cell:
                self.cells.append((f"{name}, in the closure of {path},", cell))
                self._visit_item(f"{name}, in the closure of {path}", cell, None, content)
        self._visit(f"the defaults of {path}", function.__defaults__)
        self._visit(f"the defaults of {path}", function.__kwdefaults__)
        self._compare(function.__module__, function.__globals__, names)

    def _visit_item(self, path: str, place: Any, key: Any, one: object) -> None:
        # No other tensor can be put into the rest while the step is traced.
        if isinstance(one, Tensor) and isinstance(place, (list, dict, deque, types.CellType)):
            self.loose.append((path, place, key, one))
        self._visit(path, one)

    def _read_of(self, held: Mapping[str, Any], cls: type) -> set[str]:
        """The attributes of an object that code may read."""
        looks_up = hasattr(cls, "__getattr__") and not issubclass(cls, nn.Module)
        return set(held) if self._reads_any or looks_up else self._names.intersection(held)

    def _compare(self, path: str, held: dict[str, Any], names: set[str]) -> None:
        keys = tuple(sorted(name for name in names if name in held))
        if keys:
            self.attributes.setdefault(keys, []).append((path, held))
        for key in keys:
            self._visit_item(joined(path, key), held, key, held[key])


def _is_of_library(file: str | None) -> bool:
    """Whether code is installed, and not the program's own; builtins have no file."""
    if file is None or file.startswith(_LIBRARIES):
        return True
    return not _INSTALLED.isdisjoint(Path(file).parts)


def _file_of(cls: type) -> str | None:
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def _slots_of(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots


def _imported_by(code: types.CodeType, function: types.FunctionType) -> Iterator[types.ModuleType]:
    """The modules that a function imports when it is called."""
    done = list(dis.get_instructions(code))
    for at, one in enumerate(done):
        if one.opname == "IMPORT_NAME":
            level = done[at - 2].argval  # pushed before the names that are imported
            package = function.__globals__.get("__package__") or ""
            name = "." * level + one.argval if isinstance(level, int) else one.argval
            with suppress(ImportError):
                module = sys.modules.get(importlib.util.resolve_name(name, package))
                if module is not None:
                    yield module


def _names_in(one: object) -> Sequence[str]:
    """The names of a path such as `config.scale`."""
    return one.split(".") if isinstance(one, str) else ()


def _shared_generators() -> Found:
    """The random generators that functions of `random` and `numpy.random` draw from."""
    numpy = sys.modules.get("numpy.random")
    return [(one.__name__, one) for one in (random, numpy) if one is not None]


def _is_generator(one: object) -> bool:
    numpy = cast(Any, sys.modules.get("numpy.random"))
    kinds = () if numpy is None else (numpy.Generator, numpy.RandomState)
    is_of_system = isinstance(one, random.SystemRandom)  # it has no state
    return isinstance(one, (random.Random, *kinds)) and not is_of_system


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


def _content_of(cell: Any) -> Any:
    """What a cell holds; itself if that is nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


def joined(path: str, name: str) -> str:
    """The path of an attribute of an object at a path."""
    return f"{path}.{name}" if path else name


def shown(one: object) -> str:
    """A value in a few words."""
    if isinstance(one, Tensor):
        return f"a tensor of shape {tuple(one.shape)}"
    text = repr(one)
    return text if len(text) <= 80 else f"{text[:77]}..."

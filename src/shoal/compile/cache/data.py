"""Dataclasses of pure data as JSON, checked against the types of their fields when read.

Generated code is written from such data, so that nothing may come in that is not of the type that
the writer of the code counts on.
"""

from __future__ import annotations

import functools
import keyword
import types
from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from shoal.compile.aot.signature import ViewStep
from shoal.compile.cache import values
from shoal.compile.cache.errors import DamagedError, NotExactError
from shoal.compile.cache.operators import NAMESPACES, operator_called
from shoal.compile.cache.values import Json


def to_json(value: Any, kind: Any) -> Json:
    """A value of a declared type, as JSON; refused if that is not exact."""
    if kind is Any or kind is torch.dtype:
        return values.encode(value)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _union_to_json(value, kind)
    if origin is tuple:
        if type(value) is not tuple:
            raise NotExactError(f"it holds a {type(value).__name__} where a tuple is declared")
        return list(map(to_json, value, _items(kind, value)))
    if is_dataclass(kind):
        _check_step(value, NotExactError)
        return {name: to_json(getattr(value, name), hint) for name, hint in _hints(kind).items()}
    if type(value) is not kind:
        raise NotExactError(f"it holds a {type(value).__name__} where {kind} is declared")
    return str(value) if issubclass(kind, StrEnum) else value


def from_json(json: Json, kind: Any) -> Any:
    """The value of a declared type that JSON describes."""
    if kind is Any:
        return values.decode(json)
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _union_from_json(json, kind)
    if origin is tuple:
        if type(json) is not list:
            raise DamagedError(f"expected a list for {kind}; got {json!r}")
        return tuple(map(from_json, json, _items(kind, json)))
    if is_dataclass(kind):
        return _dataclass_from_json(json, kind)
    if issubclass(kind, StrEnum):
        if type(json) is not str or json not in list(kind):
            raise DamagedError(f"expected one of {list(kind)}; got {json!r}")
        return kind(json)
    value = values.decode(json) if kind is torch.dtype else json
    if type(value) is not kind:
        raise DamagedError(f"expected {kind}; got {json!r}")
    return value


def _dataclass_from_json(json: Json, kind: Any) -> Any:
    hints = _hints(kind)
    if type(json) is not dict or json.keys() != hints.keys():
        raise DamagedError(f"expected the fields of {kind.__name__}; got {json!r}")
    made = kind(**{name: from_json(json[name], hint) for name, hint in hints.items()})
    _check_step(made, DamagedError)
    if isinstance(made, ViewStep):
        operator_called(made.op)
    return made


def _check_step(value: Any, error: type[Exception]) -> None:
    """Refuse a view by an operator that a file cannot name, or with names that are none."""
    if not isinstance(value, ViewStep):
        return
    if value.op.split(".")[0] not in NAMESPACES:
        raise error(f"an output is a view by {value.op}, which is no operator of torch's own")
    for name, _ in value.kwargs:
        if not is_name(name):
            raise error(f"{name!r} is no name of an argument")


def is_name(text: Any) -> bool:
    """Whether generated code can use a text as a name."""
    return (
        type(text) is str and text.isascii() and text.isidentifier() and not keyword.iskeyword(text)
    )


def _union_to_json(value: Any, kind: Any) -> Json:
    """A value of one of several types; one that is a dataclass with its name."""
    for member in get_args(kind):
        name = member.__name__
        if type(value) is member:
            described = to_json(value, member)
            return {name: described} if is_dataclass(member) else described
    raise NotExactError(f"it holds a {type(value).__name__} where {kind} is declared")


def _union_from_json(json: Json, kind: Any) -> Any:
    for member in get_args(kind):
        name = member.__name__
        if not is_dataclass(member):
            if type(json) is member:
                return json
        elif type(json) is dict and list(json) == [name]:
            return from_json(json[name], member)
    raise DamagedError(f"expected {kind}; got {json!r}")


def _items(kind: Any, given: Any) -> list[Any]:
    declared = list(get_args(kind))
    if len(declared) == 2 and declared[1] is Ellipsis:
        return [declared[0]] * len(given)
    if len(declared) != len(given):
        raise DamagedError(f"expected {len(declared)} items for {kind}; got {len(given)}")
    return declared


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass in order, with their declared types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}

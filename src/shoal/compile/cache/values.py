"""The closed set of values that a file can hold, as JSON.

    None, bool, int, str, finite float     as they are
    list                                   an array
    anything else                          an object with one key that says what it is

Types are kept exactly: a graph that got a tuple gets a tuple again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shoal.compile.cache import operators
from shoal.compile.cache.errors import DamagedError, NotExactError

Json = Any
"""What `json` reads and writes."""

_NAMED: dict[str, type[Any]] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}
"""Objects of torch's that are attributes of the module `torch`."""

Reference = Callable[[Any], str | None]
"""Names a value that is described elsewhere, such as a node; None for all others."""


def encode(value: Any, reference: Reference = lambda _: None) -> Json:
    """A value as JSON; refused if that is not exact."""
    name = reference(value)
    if name is not None:
        return {"node": name}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    # Graphs hold lists and dictionaries of classes of their own, which cannot be changed.
    if isinstance(value, list):
        return [encode(item, reference) for item in value]
    if type(value) is torch.Size:
        return {"size": [encode(item, reference) for item in value]}
    if type(value) is tuple:
        return {"tuple": [encode(item, reference) for item in value]}
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                raise NotExactError(f"it holds a dictionary with a key {key!r} that is no string")
        return {"dict": [[key, encode(item, reference)] for key, item in value.items()]}
    if type(value) is slice:
        parts = (value.start, value.stop, value.step)
        return {"slice": [encode(part, reference) for part in parts]}
    if type(value) is torch.device:
        return {"device": str(value)}
    for kind, cls in _NAMED.items():
        if type(value) is cls:
            return {kind: str(value).removeprefix("torch.")}
    if callable(value):
        kind, called = operators.kind_and_name(value)
        return {kind: called}
    raise NotExactError(f"it holds a {type(value).__module__}.{type(value).__qualname__}")


def decode(json: Json, node: Callable[[str], Any] | None = None) -> Any:
    """The value that JSON describes; `node` finds what is described elsewhere."""
    if json is None or type(json) in (bool, int, str):
        return json
    if type(json) is float and math.isfinite(json):
        return json
    if type(json) is list:
        return [decode(item, node) for item in json]
    if type(json) is not dict or len(json) != 1:
        raise DamagedError(f"{json!r} describes no value")
    kind, content = next(iter(json.items()))
    if kind == "node" and node is not None and type(content) is str:
        return node(content)
    if type(content) is str:
        return _decode_named(kind, content)
    if type(content) is list:
        return _decode_several(kind, content, node)
    raise DamagedError(f"{json!r} describes no value")


def _decode_named(kind: str, name: str) -> Any:
    if kind == "float" and name in ("inf", "-inf", "nan"):
        return float(name)
    if kind in operators.KINDS:
        return operators.named(kind, name)
    if kind == "device":
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise DamagedError(f"{name!r} is no device") from error
    if kind in _NAMED and type(found := getattr(torch, name, None)) is _NAMED[kind]:
        return found
    raise DamagedError(f"there is no {kind} {name!r}")


def _decode_several(kind: str, content: list[Json], node: Callable[[str], Any] | None) -> Any:
    if kind == "dict" and all(map(_is_pair, content)):
        return {key: decode(item, node) for key, item in content}
    items = [decode(item, node) for item in content]
    if kind == "tuple":
        return tuple(items)
    if kind == "size" and all(type(item) is int for item in items):
        return torch.Size(items)
    if kind == "slice" and len(items) == 3:
        return slice(*items)
    if kind == "complex" and len(items) == 2 and all(type(item) is float for item in items):
        return complex(*items)
    raise DamagedError(f"{kind!r} with {len(content)} parts describes no value")


def _is_pair(json: Json) -> bool:
    return type(json) is list and len(json) == 2 and type(json[0]) is str

"""JSON that says nothing twice, holds finite numbers alone, and is no larger in memory than real.

A text of `{}` takes 26 times its length as Python objects, and one of `[[[[]]]]` 42 times, where a
manifest of ours takes 9 times. So the signs that become objects are counted first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

_OBJECT_BYTES, _LIST_BYTES, _KEY_BYTES, _STRING_BYTES, _ITEM_BYTES = 300, 80, 220, 72, 40
"""What one of them takes at most while it is parsed, as measured; a key, if no other has its name.
A key that comes again takes the room of a pointer."""

_REAL_RATIO = 9
_SLACK_BYTES = 32 << 20


def strict_json(data: bytes, keys: Iterable[str] = ()) -> Any:
    """Parse a text, in which `keys` may come again and again.

    Raises ValueError, or RecursionError where it nests without end.
    """
    check_size(data, keys)
    return json.loads(
        data,
        object_pairs_hook=_no_duplicates,
        parse_constant=_no_constant,
        parse_float=_finite,
    )


def check_size(data: bytes, keys: Iterable[str] = ()) -> None:
    """Raise ValueError if a text can take more memory than real ones of its length do."""
    expected = _most_bytes(data, keys)
    if expected > _REAL_RATIO * len(data) + _SLACK_BYTES:
        raise ValueError(
            f"its {len(data):,} bytes can take {expected:,} in memory: too many small values"
        )


def _most_bytes(data: bytes, keys: Iterable[str]) -> int:
    """What the objects of a text can take; signs within strings are counted, too."""
    again = sum(data.count(f'"{key}":'.encode()) for key in keys)
    return (
        _OBJECT_BYTES * data.count(b"{")
        + _LIST_BYTES * data.count(b"[")
        + _KEY_BYTES * (data.count(b":") - again)
        + _STRING_BYTES * (data.count(b'"') // 2 - again)
        + _ITEM_BYTES * data.count(b",")
        + 8 * again
    )


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("the same key twice in one object")
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.40} is larger than any number here")
    return value

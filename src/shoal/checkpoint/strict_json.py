"""JSON that says nothing twice and holds no NaN: other readings of one text are refused."""

from __future__ import annotations

import json
from typing import Any


def strict_json(data: bytes) -> Any:
    """Parse a text; raises ValueError, or RecursionError where it nests without end."""
    return json.loads(data, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("the same key twice in one object")
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

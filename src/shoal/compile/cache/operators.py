"""Operators by name: torch's own and shoal's, and nothing else that a file could name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from shoal._torch import operators
from shoal.compile.cache.errors import DamagedError, NotExactError
from shoal.compile.lowering import gathered_rows

NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", gathered_rows.NAMESPACE})
"""Of operators that torch and shoal bring. What others do, and what their derivatives are, is code
that may be another tomorrow under the same name."""

HIGHER_ORDER: dict[str, Any] = {
    "run_and_save_rng_state": operators.run_and_save_rng_state,
    "run_with_rng_state": operators.run_with_rng_state,
}
"""Those of the partition, which take another operator."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in (
        *("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow"),
        *("eq", "ne", "lt", "le", "gt", "ge"),
    )
}
"""Python's own, of the module `operator`."""

_NAMES = {id(function): name for name, function in FUNCTIONS.items()}
_HIGHER_ORDER_NAMES = {id(one): name for name, one in HIGHER_ORDER.items()}


def kind_and_name(target: Any) -> tuple[str, str]:
    """What a node calls, as a file names it."""
    if isinstance(target, operators.OpOverload):
        if target.namespace not in NAMESPACES:
            raise NotExactError(f"it calls {target}, which is no operator of torch's own")
        return "op", str(target)
    if id(target) in _NAMES:
        return "function", _NAMES[id(target)]
    if id(target) in _HIGHER_ORDER_NAMES:
        return "higher_order", _HIGHER_ORDER_NAMES[id(target)]
    raise NotExactError(f"it calls {target}, which no file can name")


def named(kind: str, name: str) -> Any:
    """What a file names."""
    if kind == "function" and name in FUNCTIONS:
        return FUNCTIONS[name]
    if kind == "higher_order" and name in HIGHER_ORDER:
        return HIGHER_ORDER[name]
    if kind == "op":
        return operator_called(name)
    raise DamagedError(f"{kind} {name!r} is nothing that a graph calls")


def operator_called(name: str) -> Any:
    """An operator by its full name, such as `aten.add.Tensor`."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] not in NAMESPACES or not all(map(str.isidentifier, parts)):
        raise DamagedError(f"{name!r} is no operator of torch's own")
    gathered_rows.define()
    try:
        found = operators.operator_named(name)
    except AttributeError:
        raise DamagedError(f"torch has no operator {name!r}") from None
    if not isinstance(found, operators.OpOverload):
        raise DamagedError(f"{name!r} is no operator of torch's own")
    return found

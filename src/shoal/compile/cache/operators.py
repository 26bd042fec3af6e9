"""Operators by name: torch's own and shoal's, and nothing else that a file could name."""

from __future__ import annotations

import operator
from typing import Any

from shoal._torch import operators
from shoal.compile.cache.errors import DamagedError, NotExactError
from shoal.compile.lowering import encoded_rows, gathered_rows

NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", gathered_rows.NAMESPACE})
"""Of operators that torch and shoal bring. What others do, and what their derivatives are, is code
that may be another tomorrow under the same name."""

_FUNCTIONS = (
    *("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
_BY_NAME: dict[str, dict[str, Any]] = {
    "function": {name: getattr(operator, name) for name in _FUNCTIONS},
    "higher_order": {
        "run_and_save_rng_state": operators.run_and_save_rng_state,
        "run_with_rng_state": operators.run_with_rng_state,
    },
}
"""Functions of Python's module `operator`; operators of the partition, which take another one."""
_NAMES = {id(one): (kind, name) for kind, some in _BY_NAME.items() for name, one in some.items()}
KINDS = ("op", *_BY_NAME)
"""What a node may call, as files name it."""


def kind_and_name(target: Any) -> tuple[str, str]:
    """What a node calls, as a file names it."""
    if isinstance(target, operators.OpOverload):
        if target.namespace not in NAMESPACES:
            raise NotExactError(f"it calls {target}, which is no operator of torch's own")
        return "op", str(target)
    if id(target) in _NAMES:
        return _NAMES[id(target)]
    raise NotExactError(f"it calls {target}, which no file can name")


def named(kind: str, name: str) -> Any:
    """What a file names."""
    if kind == "op":
        return operator_called(name)
    if name in _BY_NAME.get(kind, {}):
        return _BY_NAME[kind][name]
    raise DamagedError(f"{kind} {name!r} is nothing that a graph calls")


def operator_called(name: str) -> Any:
    """An operator by its full name, such as `aten.add.Tensor`."""
    parts = name.split(".")
    if len(parts) != 3 or parts[0] not in NAMESPACES or not all(map(str.isidentifier, parts)):
        raise DamagedError(f"{name!r} is no operator of torch's own")
    gathered_rows.define()
    encoded_rows.define()
    try:
        found = operators.operator_named(name)
    except AttributeError:
        raise DamagedError(f"torch has no operator {name!r}") from None
    if not isinstance(found, operators.OpOverload):
        raise DamagedError(f"{name!r} is no operator of torch's own")
    return found

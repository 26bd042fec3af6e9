"""What the adapter uses of torch's private corners, and what it finds there.

    PYTHONPATH=src python tests/private_names.py > tests/pure/torch_names/2.13.json

writes down the names, with their signatures, for the release of torch that is installed. A test
compares: a release that changes one shows it here, before it shows in somebody's training.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ADAPTER = Path(__file__).parents[1] / "src" / "shoal" / "_torch"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
CUDA = "._cuda_"
"""In names that only builds for CUDA have."""


def release() -> str:
    """The release of torch, such as 2.13."""
    return ".".join(torch.__version__.split(".")[:2])


def private_names() -> dict[str, str]:
    """Every private name of torch's that the adapter spells out, and what it is."""
    names = {name for path in sorted(ADAPTER.glob("*.py")) for name in _names_in(path)}
    has_cuda = torch.version.cuda is not None
    return {
        name: _describe(name)
        for name in sorted(names)
        if _is_private(name) and (has_cuda or CUDA not in name)
    }


def _is_private(name: str) -> bool:
    parts = name.split(".")
    hidden = (part for part in parts if part.startswith("_") and not part.endswith("__"))
    return parts[0] == "torch" and any(hidden)


def _names_in(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                first = one.name.split(".")[0]
                known[one.asname or first] = one.name if one.asname else first
                yield one.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
            yield from (f"{node.module}.{one.name}" for one in node.names)
    for node in ast.walk(tree):
        name = _dotted(node, known)
        if name is not None:
            yield name


def _dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, known)
        return None if before is None else f"{before}.{node.attr}"
    return None


def _describe(name: str) -> str:
    try:
        found = _find(name)
    except (ImportError, AttributeError):
        return "absent"
    if inspect.ismodule(found):
        return "module"
    kind = "class" if inspect.isclass(found) else type(found).__name__
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return kind
    bare = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return f"{kind} {ADDRESS.sub('', text)}"


def _find(name: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


if __name__ == "__main__":
    json.dump(private_names(), sys.stdout, indent=1)
    print()

"""Finding in a rank the function that a test names in pytest's process."""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from _pytest.assertion.rewrite import rewrite_asserts

_bodies: dict[tuple[str, str], Callable[..., Any]] = {}


def register(body: Callable[..., Any]) -> None:
    """Remember a test's body under its name, which decorators will bind to something else."""
    _bodies[body.__module__, body.__qualname__] = body


def find(module: str, file: str, qualname: str) -> Callable[..., Any]:
    """Return the function, importing its module first where this process has not yet done so."""
    found: Any = _import(module, file)
    body = _bodies.get((module, qualname))
    if body is not None:
        return body
    for name in qualname.split("."):
        found = getattr(found, name)
    return found


def _import(name: str, file: str) -> ModuleType:
    """Import a test file by its path, since no folder on `sys.path` holds it; others by name."""
    if name in sys.modules:
        return sys.modules[name]
    if not Path(file).name.startswith("test_"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    source = Path(file).read_bytes()
    tree = ast.parse(source, filename=file)
    # Ranks run no pytest, yet a failing assert must show its values there too.
    rewrite_asserts(tree, source, file)
    _insert_parents(name, Path(file))
    sys.modules[name] = module
    try:
        exec(compile(tree, file, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    # What a module made lives as long as the rank: keep it out of the collection after each test.
    gc.freeze()
    return module


def _insert_parents(name: str, file: Path) -> None:
    """Stand in for the folders of a dotted name, which pickle imports before the module itself."""
    for folder in file.parents:
        name = name.rpartition(".")[0]
        if not name:
            return
        parent = ModuleType(name)
        parent.__path__ = [str(folder)]
        sys.modules.setdefault(name, parent)

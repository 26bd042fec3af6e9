"""The scripts of `examples/`, as modules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[1] / "examples"


def names() -> list[str]:
    """The scripts by name."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def text(name: str) -> str:
    """The source of a script."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def load(name: str, **instead: str) -> ModuleType:
    """Run a script's definitions; with `shoal_fsdp="torch.distributed.fsdp"`, on that module."""
    if str(FOLDER) not in sys.path:  # scripts import `start`, as they do when they are run
        sys.path.insert(0, str(FOLDER))
    source = text(name)
    for ours, theirs in instead.items():
        before, line = source, f"from {ours.replace('_', '.')}"
        source = source.replace(f"{line} import", f"from {theirs} import")
        source = source.replace(f"{line}.", f"from {theirs}.")
        if source == before:
            raise ValueError(f"{name}.py has no line {line!r}")
    module = ModuleType(name)
    module.__file__ = str(FOLDER / f"{name}.py")
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(source, module.__file__, "exec"), vars(module))
    return module

"""Imports inside shoal point one way, and private torch names stay in one folder."""

import ast
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "shoal"
FILES = sorted(PACKAGE.rglob("*.py"))

GROUND = ("errors", "version", "files", "_torch", "sharding_wrapper")
"""Under every layer, in this order."""
LAYERS = (
    "mesh",
    "layout",
    "step",
    "comm",
    "tensor",
    "low_precision",
    "optim",
    "runtime",
    "offload",
    "experts",
    "ddp",
    "distant",
    "watch",
    "compile",
    "checkpoint",
    "survive",
    "doors",
    "uneven",
    "plan",
    "report",
    "train",
    "integrations",
    "bench",
    "cli",
)
PATHS = ("fsdp", "sharded_tensor", "sharding_spec", "sharded_optim", "passes", "aot")
"""Thin modules that show folders under torch's import paths: over every layer."""
TOP = ("_requirements", "__init__", "__main__")
ORDER = {name: height for height, name in enumerate((*GROUND, *LAYERS, *PATHS, *TOP))}

ADAPTER = sorted((PACKAGE / "_torch").rglob("*.py"))


def part(file: Path) -> str:
    """Name the layer, import path or module right under the package that holds a file."""
    if file.name == "__main__.py":
        return "__main__"  # run, and imported by nobody
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_name(file: Path) -> str:
    parts = ("shoal", *file.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(tree: ast.Module, file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything imported, wherever in the file it stands."""
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package.pop()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield node.lineno, f"{origin}.{alias.name}"


def shoal_parts(tree: ast.Module, file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and part for each import from shoal; a name of the package itself is its top."""
    for line, name in imported_modules(tree, file):
        first, *rest = name.split(".")
        if first == "shoal":
            yield line, rest[0] if rest and rest[0] in ORDER else "__init__"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def torch_names(tree: ast.Module) -> set[str]:
    """Return the names that a file binds to torch or to something from it."""
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    bound.add(alias.asname or "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound.update(alias.asname or alias.name for alias in node.names)
    return bound


def private_torch_uses(tree: ast.Module, file: Path) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private corner of torch that a file imports or reaches into."""
    for line, name in imported_modules(tree, file):
        if name.split(".")[0] == "torch" and any(map(private, name.split("."))):
            yield line, name
    bound = torch_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in bound:
                yield node.lineno, ast.unparse(node)


@functools.cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), filename=str(file))


def test_every_part_of_the_package_has_a_place():
    strangers = {part(file) for file in FILES} - ORDER.keys()
    assert not strangers, f"give {sorted(strangers)} a place in LAYERS or PATHS of this test"


def test_folders_are_tables_of_contents():
    """A folder of more files than this is no list that somebody reads."""
    counts = Counter(file.parent for file in FILES)
    large = {str(folder): count for folder, count in counts.items() if count > 25}
    assert not large, f"merge files that are one thought, or give them a folder: {large}"


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_point_one_way(file):
    here = part(file)
    wrong = [
        f"{file}:{line}: {here} imports {other}, which stands above it"
        for line, other in shoal_parts(parse(file), file)
        if ORDER[other] > ORDER[here]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", [file for file in FILES if file not in ADAPTER], ids=module_name)
def test_private_torch_names_stay_in_the_adapter(file):
    wrong = [
        f"{file}:{line}: {name} belongs in the adapter"
        for line, name in private_torch_uses(parse(file), file)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch._C import _distributed", ["torch._C._distributed"]),
        ("from torch import _foreach_copy_ as copy", ["torch._foreach_copy_"]),
        ("import torch.distributed as dist\ndist._find()", ["dist._find"]),
        ("import torch\ndef f(): return torch.a._b.c", ["torch.a._b"]),
        ("from torch.x import DTensor\nDTensor._spec", ["DTensor._spec"]),
        ("import torch\ntorch.__version__", []),
        ("self._torch._x", []),
    ],
)
def test_private_names_are_recognised(source, found):
    uses = private_torch_uses(ast.parse(source), PACKAGE / "runtime" / "unit.py")
    assert [name for _, name in uses] == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import shoal", ["__init__"]),
        ("from shoal import fully_shard", ["__init__"]),
        ("from shoal import _torch", ["_torch"]),
        ("from shoal.layout.even import Even", ["layout"]),
        ("def f():\n    import shoal.cli.main", ["cli"]),
        ("from . import schedule", ["runtime"]),
        ("from ..mesh import Mesh", ["mesh"]),
        ("import shoals", []),
    ],
)
def test_imports_are_recognised(source, found):
    parts = shoal_parts(ast.parse(source), PACKAGE / "runtime" / "unit.py")
    assert [name for _, name in parts] == found


def test_importing_shoal_does_nothing_and_needs_torch_alone():
    script = """
import os, sys, threading, warnings
before, finders = dict(os.environ), list(sys.meta_path)
import torch
imported_by_torch = set(sys.modules)
threads = threading.active_count()
import shoal
new = set(sys.modules) - imported_by_torch
print(sorted(new & {"rich", "safetensors", "jinja2"}))
print(threading.active_count() - threads, dict(os.environ) == before)
print(sys.meta_path == finders)
print(torch.distributed.is_initialized(), torch.cuda.is_initialized())
from shoal import fully_shard
print(sorted(set(sys.modules) & {"torch._dynamo", "torch._inductor"}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["[]", "0 True", "True", "False False", "[]"], done.stderr
    assert done.stderr == ""


def test_the_core_imports_no_door_until_torchs_older_api_is_called():
    script = """
import sys
import shoal.checkpoint, shoal.compile.backend, shoal.runtime.fully_shard, shoal.tensor
print([name for name in sys.modules if name.startswith("shoal.doors")])
try:
    shoal.tensor.ShardedTensor("no spec", 4)
except ValueError as error:
    print(str(error).split(" but")[0])
print("shoal.doors.sharded_tensor" in sys.modules, "shoal.doors.fsdp1" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["[]", "Expecting ShardingSpec", "True False"], done.stderr

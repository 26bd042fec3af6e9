"""`docs/architecture.md` names files and names that exist, and leaves none of torch's out."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shoal"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`((?!torch/)(?:\w+/)*\w+\.py)(?:: ([\w.]+))?`")
"""A file of ours, and maybe something in it."""
TORCH = re.compile(r"^### `torch/(\S+\.py)`$", re.MULTILINE)
MOST_FILES = {"An eager step": 12, "A compiled step": 25}


def places() -> list[tuple[str, str]]:
    return sorted({(m[1], m[2] or "") for m in NAMED.finditer(PAGE)})


@functools.cache
def names_in(file: str) -> frozenset[str]:
    """The functions, classes and assigned names of a file, methods with their class."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            found.update(f"{node.name}.{method.name}" for method in methods)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found.update(target.id for target in targets if isinstance(target, ast.Name))
    return frozenset(found)


@pytest.mark.parametrize(("file", "name"), places())
def test_what_is_named_exists(file: str, name: str) -> None:
    assert (PACKAGE / file).is_file(), f"no file {file}"
    assert not name or name in names_in(file), f"no {name} in {file}"


def section(title: str) -> str:
    return PAGE.split(f"\n### {title}\n")[1].split("\n## ")[0].split("\n### ")[0]


@pytest.mark.parametrize("title", ["An eager step", "A compiled step", "A save", "`shoal train`"])
def test_a_walk_goes_through_each_file_once(title: str) -> None:
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`", section(title), re.MULTILINE)
    assert len(steps) >= 4
    assert len(steps) == len(set(steps)), "a walk that comes back"
    assert len(steps) <= MOST_FILES.get(title, 25)


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the tables are of torch 2.13's files"
)
@pytest.mark.parametrize("file", TORCH.findall(PAGE))
def test_every_name_of_torch_has_a_row(file: str) -> None:
    table = section(f"`torch/{file}`")
    rows = set(re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE))
    tree = ast.parse((Path(torch.__file__).parent / file).read_text(encoding="utf-8"))
    wanted = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    if "sharded_tensor" in file:  # one class has everything
        wanted |= {
            f"{c.name}.{n.name}"
            for c in tree.body
            if isinstance(c, ast.ClassDef)
            for n in c.body
            if isinstance(n, ast.FunctionDef) and not n.name.startswith("__")
        }
    assert not wanted - rows, f"torch's names without a row: {sorted(wanted - rows)}"


def test_all_five_of_torchs_files_are_there() -> None:
    assert len(TORCH.findall(PAGE)) == 5


def test_a_class_name_stands_for_one_thing() -> None:
    files: dict[str, list[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                files.setdefault(node.name, []).append(str(file.relative_to(PACKAGE)))
    twice = {name: where for name, where in files.items() if len(where) > 1}
    assert not twice

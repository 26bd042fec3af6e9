"""`docs/environment.md` names every environment variable that the source touches, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "shoal").rglob("*.py"))
PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
PART = re.compile(r"_?[A-Z][A-Z0-9_]+_?")


def documented() -> set[str]:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([A-Z][A-Z_0-9]+)`", row.split("|")[1])}


def strings(tree: ast.AST) -> set[str]:
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    return {n.value for n in nodes if isinstance(n.value, str) and PART.fullmatch(n.value)}


def parts_in_source() -> set[str]:
    """Names of variables, or parts that f-strings join, in files that touch the environment."""
    found: set[str] = set()
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        if re.search(r"\bos\.(environ|getenv)\b", text):
            found |= strings(tree)
        found |= {name for name in strings(tree) if name.startswith(("SHOAL_", "FSDP_USE_"))}
    return found


def test_every_variable_of_the_source_has_a_row() -> None:
    everything = documented() | {"XDG_CACHE_HOME"}
    missing = {p for p in parts_in_source() if not any(p in name for name in everything)}
    assert not missing


def test_every_row_is_in_the_source() -> None:
    parts = parts_in_source()
    for name in documented():
        joined = any(
            name == first + second for first in parts for second in parts if first and second
        )
        assert name in parts or joined, name


def test_variables_of_tests_and_pages_exist() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for name in re.findall(r"\bSHOAL_[A-Z_]+\b", page.read_text(encoding="utf-8")):
            assert name in documented(), f"{page.name} tells of {name}"

"""The package's metadata agree with each other, and `help` tells what type checkers know."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from shoal import _requirements
from shoal.runtime import fully_shard as module
from shoal.version import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_torchs_bounds_are_those_that_are_checked() -> None:
    oldest, newest = _requirements.OLDEST, _requirements.NEWEST
    bounds = f"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"
    assert bounds in PROJECT["dependencies"]


def test_classifiers_have_the_python_that_is_required() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    versions = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert versions[0] == oldest


def test_citation_has_the_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(__version__)}$", text, re.MULTILINE)
    assert f"license: {PROJECT['license']}" in text


def test_layers_of_contributing_are_folders() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.search(r"`(mesh → [^`]+)`", text)
    assert found is not None
    for layer in found[1].split(" → "):
        assert (ROOT / "src" / "shoal" / layer / "__init__.py").is_file(), layer


@pytest.mark.parametrize("name", ["fully_shard"])
def test_help_explains_every_argument(name: str) -> None:
    function = getattr(module, name)
    explained = re.findall(r"^    (\w+): ", inspect.getdoc(function) or "", re.MULTILINE)
    taken = [p for p in inspect.signature(function).parameters if p != "unknown"]
    assert explained[: len(taken)] == taken


@pytest.mark.parametrize(
    ("name", "options"),
    [("fully_shard", module.ShardOptions), ("replicate", module.ReplicateOptions)],
)
def test_type_checkers_know_the_arguments(name: str, options: Any) -> None:
    function = getattr(module, name)
    real = get_type_hints(function)
    keywords = {p for p in inspect.signature(function).parameters if p not in ("module", "unknown")}
    assert get_type_hints(options) == {keyword: real[keyword] for keyword in keywords}

"""Scripts written for `torch.distributed.fsdp` give the same results when only the import changes.

Each script is run twice on live ranks: as it stands, and with `torch.distributed.fsdp` replaced by
`shoal.fsdp` in its import lines. What it returns must agree on every rank: names, shapes, dtypes
and placements exactly, numbers to rounding.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp

from harness import GLOO, NCCL, Setup, on_ranks

SCRIPTS = Path(__file__).parent / "scripts"
SHARED = "tiny"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != SHARED)
IMPORT = re.compile(r"^(from|import) torch\.distributed\.fsdp\b", re.MULTILINE)
NUM_RANKS = re.compile(r"torchrun --nproc-per-node (\d+)")

# On CPU torch's random operators warn that they draw the same numbers on every rank.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators")


def source_of(name: str, engine: str, folder: Path = SCRIPTS) -> str:
    """The script with its imports taken from `engine`, and nothing else changed."""
    return IMPORT.sub(rf"\1 {engine}", (folder / f"{name}.py").read_text())


def num_ranks(name: str) -> int:
    """How many ranks the script's own first lines ask for."""
    found = NUM_RANKS.search(source_of(name, "torch.distributed.fsdp"))
    assert found is not None, f"{name} does not say how it is launched"
    return int(found.group(1))


def run(name: str, engine: str, device: str, folder: Path = SCRIPTS) -> dict[str, Any]:
    """Execute the script's source on this rank and call its main function."""
    sys.path[:0] = [path for path in map(str, {SCRIPTS, folder}) if path not in sys.path]
    code = compile(source_of(name, engine, folder), f"{name} on {engine}", "exec")
    namespace: dict[str, Any] = {"__name__": name}
    exec(code, namespace)
    torch.manual_seed(0)
    return json.loads(json.dumps(namespace["main"](torch.device(device))))


def check_same(found: object, expected: object, where: str, rel: float) -> None:
    """Compare two results part by part, so that a difference names its place."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert list(found) == list(expected), where
        for key, value in expected.items():
            check_same(found[key], value, f"{where}.{key}", rel)
    elif isinstance(expected, list):
        assert isinstance(found, list), where
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            check_same(found[index], value, f"{where}[{index}]", rel)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=rel, abs=rel), where
    else:
        assert found == expected, where


def check_script(name: str, setup: Setup, rel: float) -> None:
    """Run the script on both engines, and compare."""
    size = num_ranks(name)
    theirs, ours = (
        on_ranks(size, run, name, engine, setup.device, setup=setup)
        for engine in ("torch.distributed.fsdp", "shoal.fsdp")
    )
    for rank in range(size):
        check_same(ours[rank], theirs[rank], f"rank {rank}", rel)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_import_changes(name: str) -> None:
    check_script(name, GLOO, rel=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_only_the_import_changes_on_nccl(name: str) -> None:
    check_script(name, NCCL, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_scripts_use_public_names_only(name: str) -> None:
    source = source_of(name, "torch.distributed.fsdp")
    changed = source_of(name, "shoal.fsdp")
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed.fsdp":
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            assert not private, f"line {node.lineno}: {node.attr} is private"
    assert imported, "the script imports nothing of the engine"
    assert imported <= set(torch.distributed.fsdp.__all__)
    assert "torch.distributed.fsdp" not in changed, "a use that an import line does not show"


def test_there_are_ten_scripts() -> None:
    assert len(NAMES) == 10


def test_a_script_runs_by_itself() -> None:
    """Two ranks under torchrun print what the same script returns inside the harness."""
    name = "basic_training"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks(name)}", str(SCRIPTS / f"{name}.py")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = on_ranks(num_ranks(name), run, name, "torch.distributed.fsdp", "cpu")
    check_same(json.loads(done.stdout), expected[0], "rank 0", rel=1e-6)

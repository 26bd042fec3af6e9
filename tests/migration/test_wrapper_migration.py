"""Scripts written for torch's wrapper give the same results when only the import changes.

They are run as those of `fully_shard` are: see `test_migration`.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import GLOO, NCCL, Setup, on_ranks
from migration import test_migration as common

SCRIPTS = Path(__file__).parent / "wrapper_scripts"
SHARED = "tiny_steps"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != SHARED)
ENGINE = "torch.distributed.fsdp"

# torch's words on its own old names, and on models that train on the CPU.
pytestmark = pytest.mark.filterwarnings("ignore")


def run(name: str, engine: str, device: str) -> dict[str, Any]:
    """Execute a script of this folder on this rank."""
    return common.run(name, engine, device, folder=SCRIPTS)


def check_script(name: str, setup: Setup, rel: float) -> None:
    """Run the script on both engines, and compare."""
    found = re.search(r"torchrun --nproc-per-node (\d+)", (SCRIPTS / f"{name}.py").read_text())
    assert found is not None, f"{name} does not say how it is launched"
    size = int(found.group(1))
    theirs, ours = (
        on_ranks(size, run, name, engine, setup.device, setup=setup)
        for engine in (ENGINE, "shoal.fsdp")
    )
    for rank in range(size):
        common.check_same(ours[rank], theirs[rank], f"rank {rank}", rel)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_import_changes(name: str) -> None:
    check_script(name, GLOO, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_only_the_import_changes_on_nccl(name: str) -> None:
    check_script(name, NCCL, rel=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_scripts_use_public_names_only(name: str) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse((SCRIPTS / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(ENGINE):
            names = {alias.name for alias in node.names}
            public = set(getattr(importlib.import_module(node.module or ""), "__all__", names))
            assert names <= public | {"FlatParameter"}, f"line {node.lineno}"
            imported |= names
        elif isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            assert not private, f"line {node.lineno}: {node.attr} is private"
    assert "FullyShardedDataParallel" in imported
    assert ENGINE not in common.source_of(name, "shoal.fsdp", folder=SCRIPTS)


def test_there_are_ten_scripts_and_more() -> None:
    assert len(NAMES) >= 10

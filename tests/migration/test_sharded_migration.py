"""Scripts written for torch's ShardedTensor give the same results when only the import changes."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import on_ranks

SCRIPTS = Path(__file__).parent / "sharded_scripts"
SHARED = "readings"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != SHARED)
NUM_RANKS = re.compile(r"torchrun --nproc-per-node (\d+)")
IMPORT = re.compile(r"^(from|import) torch\.distributed\._shard\.(\w+)", re.MULTILINE)
FRESH = ("checkpointing", "custom_op", "remote")
"""What leaves something behind in a process: torch marks a hook, replaces functions, runs RPC."""
DOORS = {
    "api": "sharded_tensor.api",
    "sharded_tensor": "sharded_tensor",
    "sharding_plan": "sharded_tensor",
    "sharding_spec": "sharding_spec",
}
"""Which module of shoal has the names of which of torch's."""


def source_of(name: str, *, changed: bool) -> str:
    """The script, perhaps with its imports taken from shoal; nothing else changes."""
    source = (SCRIPTS / f"{name}.py").read_text()
    if not changed:
        return source
    return IMPORT.sub(lambda found: f"{found[1]} shoal.{DOORS[found[2]]}", source)


def num_ranks(name: str) -> int:
    """How many ranks the script's own first lines ask for."""
    found = NUM_RANKS.search(source_of(name, changed=False))
    assert found is not None, f"{name} does not say how it is launched"
    return int(found.group(1))


def run(name: str, changed: bool) -> dict[str, Any]:
    """Execute the script's source on this rank and call its main function."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    code = compile(source_of(name, changed=changed), f"{name}, changed: {changed}", "exec")
    # Pickles name their classes by module, so the script is one.
    module = type(sys)(name)
    sys.modules[name] = module
    with warnings.catch_warnings():
        # torch's word on the end of its class.
        warnings.filterwarnings("ignore", category=FutureWarning)
        exec(code, vars(module))
        torch.manual_seed(0)
        return json.loads(json.dumps(module.main()))


@pytest.mark.parametrize("name", NAMES)
def test_only_the_import_changes(name: str) -> None:
    theirs, ours = (
        on_ranks(num_ranks(name), run, name, changed, fresh=name in FRESH)
        for changed in (False, True)
    )
    assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_scripts_use_public_names_only(name: str) -> None:
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source_of(name, changed=False))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "torch.distributed._shard"
        ):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            private = node.attr.startswith("_") and not node.attr.endswith("__")
            assert not private, f"line {node.lineno}: {node.attr} is private"
    assert imported, "the script imports nothing of the library"
    assert not any(each.startswith("_") for each in imported)
    assert "torch.distributed._shard" not in source_of(name, changed=True)


def test_there_are_eight_scripts() -> None:
    assert len(NAMES) == 8


@pytest.mark.parametrize("changed", [False, True])
def test_a_script_runs_by_itself(changed: bool, tmp_path: Path) -> None:
    """Two ranks under torchrun print what the same script returns inside the harness."""
    name = "local_shards"
    for file in (name, SHARED):
        (tmp_path / f"{file}.py").write_text(source_of(file, changed=changed))
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks(name)}", str(tmp_path / f"{name}.py")]
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == on_ranks(num_ranks(name), run, name, changed)[0]

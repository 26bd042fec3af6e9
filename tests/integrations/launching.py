"""Run a script on 2 gloo ranks by torchrun, with the framework that it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTS = HERE / "scripts"
EXAMPLES = ROOT / "examples"


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip tests where one of the packages is not installed."""
    missing = []
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            missing.append(package)
    reason = f"needs {', '.join(missing)}: run `make test-integrations`"
    return pytest.mark.skipif(bool(missing), reason=reason)


def environment(**more: str) -> dict[str, str]:
    """One thread for each rank, no network, this tree's shoal."""
    names = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    names["PYTHONPATH"] = str(ROOT / "src")
    return {**names, **more}


def python(
    script: Path, *arguments: object, timeout_s: float = 240, env: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    """Run one process to the end, and give back what was printed."""
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def torchrun(
    script: Path,
    *arguments: object,
    ranks: int = 2,
    timeout_s: float = 240,
    env: Mapping[str, str] = {},
    launcher: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run to the end, and give back what was printed."""
    start = launcher or ("-m", "torch.distributed.run", "--standalone")
    command = [sys.executable, *start, f"--nproc-per-node={ranks}", script, *arguments]
    if launcher:
        command[len(start) + 1] = f"--num_processes={ranks}"
    return subprocess.run(
        [str(part) for part in command],
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def succeed(done: subprocess.CompletedProcess[str]) -> str:
    """What a run printed, if it went well."""
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout

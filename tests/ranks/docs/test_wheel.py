"""The built wheel in an empty environment, and the commands of the README typed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def run(*words: object, cwd: Path, variables: dict[str, str] | None = None) -> str:
    kept = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **(variables or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def shell_commands() -> list[str]:
    """The lines of the README's shell blocks, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).splitlines()
    return [line.partition("#")[0].strip() for line in lines if line.strip()]


def test_pip_install_is_the_first_command() -> None:
    assert shell_commands()[0] == "pip install shoal"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation"),
        *("--outdir", tmp_path / "dist", ROOT),
        cwd=tmp_path,
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "shoal/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "examples/"))]

    venv.create(tmp_path / "empty", with_pip=True)
    programs = tmp_path / "empty" / "bin"
    constraints = ROOT / "constraints.txt"
    install = (programs / "pip", "install", "--quiet", "--constraint", constraints)
    run(*install, wheel, cwd=tmp_path)
    installed = run(programs / "pip", "list", cwd=tmp_path)
    assert not re.search(r"^(transformers|tensorboard|pytest) ", installed, re.MULTILINE)

    script = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    program_path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    for command in commands_to_type():
        run("bash", "-c", command, cwd=tmp_path, variables=program_path)
    assert (tmp_path / "runs" / "demo" / "report.html").exists()


def commands_to_type() -> list[str]:
    """Those of one machine, in few steps; `shoal bench` is tested elsewhere."""
    asks_for_more = (
        "pip install",
        "hf download",
        "shoal bench",
        "--data",
        "--recipe",
        "--nproc-per-node 8",
    )
    here = [one for one in shell_commands() if not any(more in one for more in asks_for_more)]
    assert len(here) >= 6
    return [
        one.replace("shoal train", "shoal train --steps 3 --overwrite --sample-tokens 8")
        if one in ("shoal train", "shoal train --name demo", "shoal train --compile inductor")
        else one.replace("runs/NAME --steps +500", "runs/demo --steps +2")
        for one in here
    ]

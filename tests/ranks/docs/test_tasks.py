"""Task pages: their Python is in the scripts that `test_examples.py` runs, their commands work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import example_scripts

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs" / "tasks").glob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./\.\./examples/(\w+)\.py\)")
NO_SCRIPT = {"survive_faults"}
"""Pages about a command alone."""
FRAMEWORKS = {
    "accelerate": ("accelerate", "peft", "trl"),
    "hugging_face": ("transformers",),
    "lightning": ("lightning",),
    "ray": ("ray",),
    "titan": ("torchtitan",),
}
"""What a page's commands need beside shoal."""


def script_of(page: Path) -> str:
    """The script that a page is about: the first that it links to."""
    found = LINK.search(page.read_text("utf-8"))
    assert found is not None, f"{page.name} links to no ../../examples/NAME.py"
    return found[1]


def blocks() -> list[tuple[str, str]]:
    """Every Python block of the task pages, by page."""
    return [(page.stem, code) for page in PAGES for code in PYTHON.findall(page.read_text("utf-8"))]


def commands(page: Path) -> list[str]:
    """The indented commands of a page, with lines that a backslash continues joined."""
    text = PYTHON.sub("", page.read_text("utf-8"))
    lines = "".join(INDENTED.findall(text)).replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines]


def dedented_parts(source: str, num_lines: int) -> set[str]:
    """All stretches of so many lines, without the indentation they share."""
    lines = source.splitlines()
    return {
        textwrap.dedent("\n".join(lines[i : i + num_lines])).strip()
        for i in range(len(lines) - num_lines + 1)
    }


@pytest.mark.parametrize(("page", "code"), blocks())
def test_python_of_a_page_is_an_excerpt_of_its_script(page: str, code: str) -> None:
    code, script = code.strip(), script_of(ROOT / "docs" / "tasks" / f"{page}.md")
    assert code in dedented_parts(example_scripts.text(script), len(code.splitlines()))


def test_a_block_that_is_in_no_script_is_found() -> None:
    source = example_scripts.text("start")
    code = "for block in model.blocks:\n    fully_shard(block)\nfully_shard(model)"
    assert code in dedented_parts(source, 3)
    assert code.replace("model)", "net)") not in dedented_parts(source, 3)
    assert textwrap.indent(code, "  ") not in dedented_parts(source, 3)


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in NO_SCRIPT])
def test_a_page_links_to_its_script_and_runs_it(page: Path) -> None:
    script = script_of(page)
    assert any(f"{script}.py" in command for command in commands(page))


def test_every_script_has_its_page() -> None:
    listed = {script_of(page) for page in PAGES if page.stem not in NO_SCRIPT}
    shown = "".join(page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md"))
    for name in example_scripts.names():
        assert name in listed or f"examples/{name}" in shown, f"no page shows {name}.py"


def typed() -> list[tuple[str, str]]:
    """The commands of the pages that can be typed here: no folder of the reader's, no hosts."""
    return [
        (page.stem, command)
        for page in PAGES
        for command in commands(page)
        if command.split()[0] != "pip"
        and "FOLDER" not in command
        and not any(more in command for more in ("--nnodes", "--nproc-per-node 8"))
        and "--name safe" not in command
    ]


PROGRAMS = {
    "torchrun": ["-m", "torch.distributed.run"],
    "shoal": ["-m", "shoal"],
    "accelerate": ["-m", "accelerate.commands.launch"],  # of `accelerate launch`
    "python": [],
}
"""What starts a command's program, as arguments of this Python."""

FAILS = {"stays-away": "rank 1 did not come to the gather", "order": "ranks differ in collective"}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "command"), typed())
def test_commands_can_be_typed(page: str, command: str, tmp_path: Path) -> None:
    for framework in FRAMEWORKS.get(page, ()):
        pytest.importorskip(framework, reason=f"{page}.md needs {framework}")
    variables, words = {}, shlex.split(command.replace("/tmp/", f"{tmp_path}/"))
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    words = PROGRAMS[words[0]] + words[1 + (words[0] == "accelerate") :]
    if "resume" in command and "20" in words:  # goes on from the command before it
        subprocess.run([sys.executable, *words[:-1], "10"], check=True, cwd=ROOT)
    path = f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    output = done.stdout + done.stderr
    mistake = next((FAILS[word] for word in words if word in FAILS), None)
    if mistake is None:
        assert done.returncode == 0, output
    else:
        assert done.returncode == 1
        assert mistake in output

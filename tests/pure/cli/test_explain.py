"""`shoal explain` runs a script as Python would, and tells what was compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.cli.explain import shoal_by_default
from shoal.cli.main import main
from shoal.compile.observe import forget

# Torch's own tracing looks at the gradient of a tensor inside a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SHOAL_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    forget()
    torch._dynamo.reset()
    yield
    forget()
    torch._dynamo.reset()


def script(text: str) -> str:
    Path("script.py").write_text(text)
    return "script.py"


COMPILES = """
import torch

@torch.compile
def broken(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos() * y

for size in (3, 5):
    x = torch.ones(size, 4, requires_grad=True)
    broken(x).sum().backward()
"""


def test_it_tells_graphs_breaks_recompilations_and_cache(capsys) -> None:
    assert main(["explain", script(COMPILES)]) == 0
    out = capsys.readouterr().out
    assert "script.py:6" in out
    assert "script.py:8" in out
    assert "4 graphs, 2 breaks, 2 recompilations" in out
    assert "break at script.py:7: Call to `torch._dynamo.graph_break()`" in out
    assert "again at script.py:4: broken: tensor 'x' size mismatch at index 0" in out
    assert "not cached: graph" in out
    assert "0 of 4 hit" in out
    assert "passes, joint: rebind_sizes, drop_aliases, " in out
    forget()
    torch._dynamo.reset()
    assert main(["explain", script(COMPILES)]) == 0
    assert "2 of 4 hit" in capsys.readouterr().out


def test_a_script_gets_its_arguments_and_its_neighbours(capsys) -> None:
    Path("folder").mkdir()
    Path("folder/neighbour.py").write_text("NAME = 'neighbour'\n")
    file = "folder/script.py"
    Path(file).write_text("import sys, neighbour\nprint(sys.argv, neighbour.NAME, __name__)\n")
    assert main(["explain", file, "--steps", "3", "--traceback"]) == 0
    out = capsys.readouterr().out
    assert f"['{file}', '--steps', '3', '--traceback'] neighbour __main__\n" in out
    assert "0 graphs, 0 breaks, 0 recompilations" in out


@pytest.mark.parametrize(
    ("end", "code", "err"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('enough')", 1, "enough\n"),
    ],
)
def test_the_exit_code_is_the_scripts(capsys, end: str, code: int, err: str) -> None:
    assert main(["explain", script(end)]) == code
    captured = capsys.readouterr()
    assert captured.err == err
    assert "0 graphs" in captured.out


def test_an_error_of_the_script_is_shown_as_python_shows_it(capsys) -> None:
    assert main(["explain", script("def f():\n    return 1 / 0\nf()\n")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(
        'Traceback (most recent call last):\n  File "script.py", line 3, in <module>'
    )
    assert captured.err.endswith("ZeroDivisionError: division by zero\n")
    assert "0 graphs" in captured.out


def test_a_missing_script_is_wrong_input(capsys) -> None:
    assert main(["explain", "missing.py"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "shoal: error: there is no script missing.py\n"
    assert captured.out == ""


def test_only_calls_that_name_nothing_are_changed(monkeypatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: seen.append(kwargs))
    with shoal_by_default():
        torch.compile(torch.sin)
        torch.compile(torch.sin, backend="eager")
        torch.compile(torch.sin, options={"max_autotune": True})
        torch.compile(dynamic=True)
    torch.compile(torch.sin)
    assert [one.get("backend") for one in seen] == ["shoal", "eager", None, "shoal", None]


def test_under_torchrun_one_rank_tells(capsys, monkeypatch) -> None:
    for rank in (0, 1):
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, str(rank))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, "2")
        assert main(["explain", script("print('ran')")]) == 0
        out = capsys.readouterr().out
        assert out.startswith("ran\n")
        assert ("0 graphs" in out) is (rank == 0)

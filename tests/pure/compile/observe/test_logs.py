"""What is asked for is logged, nothing else is, and nothing is computed for what is not."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from compile_compare import BACKEND
from shoal.compile.observe import observation
from shoal.compile.observe.logs import Topic, topics_of
from shoal.errors import UsageError

pytestmark = pytest.mark.skipif(BACKEND != "shoal", reason="tests our own backend")


def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = (x @ x).sin()
    return y.t(), y.exp(), y[0]


def run(**options: str) -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 4, requires_grad=True)
    out = torch.compile(program, backend="shoal", options={"cache": False, **options})(x)
    out[1].sum().backward()


def logged(caplog) -> dict[str, str]:
    found: dict[str, str] = {}
    for record in caplog.records:
        if record.name.startswith("shoal.compile."):
            topic = record.name.removeprefix("shoal.compile.")
            found[topic] = found.get(topic, "") + record.getMessage() + "\n"
    return found


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.delenv("SHOAL_LOGS", raising=False)


def test_all_topics(caplog, monkeypatch) -> None:
    monkeypatch.setenv("SHOAL_LOGS", "all")
    with caplog.at_level(logging.INFO, "shoal.compile"):
        run()
    found = logged(caplog)
    assert "output 0: view of base 0: aten.t.default[]" in found["signature"]
    for title in ("from Dynamo", "captured", "forward", "backward"):
        assert f": {title}\n" in found["graphs"]
    assert "aten.mm.default(" in found["graphs"]
    assert "float32[4, 4]" in found["graphs"]
    for title in ("call", "forward", "backward"):
        assert f": {title}\n" in found["code"]
    assert "def call(a0):" in found["code"]
    assert "forward saves" in found["partition"]


@pytest.mark.parametrize("how", ["environment", "option"])
def test_one_topic(caplog, monkeypatch, how: str) -> None:
    with caplog.at_level(logging.INFO, "shoal.compile"):
        if how == "environment":
            monkeypatch.setenv("SHOAL_LOGS", " partition ,signature")
            run()
        else:
            run(logs="partition,signature")
    assert set(logged(caplog)) == {"partition", "signature"}


def test_breaks_and_recompilations(caplog) -> None:
    @torch.compile(backend="shoal", options={"logs": "breaks", "cache": False})
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    torch._dynamo.reset()
    with caplog.at_level(logging.INFO, "shoal.compile"):
        broken(torch.ones(3))
        broken(torch.ones(4))
    found = logged(caplog)["breaks"]
    assert f"break at {__file__}:" in found
    assert "torch._dynamo.graph_break()" in found
    assert f"broken ({__file__}:" in found
    assert "size mismatch at index 0. expected 3, actual 4" in found
    assert found.count("expected 3, actual 4") == 2, "each is told once"


def test_nothing_is_written_or_computed_unasked(caplog, monkeypatch) -> None:
    def never(*args: object) -> str:
        raise AssertionError("computed unasked")

    from shoal.compile import backend
    from shoal.compile.aot import compiler

    for module, names in (
        (compiler, ("graph_text", "saved_text", "signature_text")),
        (backend, ("graph_text",)),
        (observation.logs, ("write",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, never)
    run()
    assert logged(caplog) == {}


def test_topics() -> None:
    assert topics_of("") == frozenset()
    assert topics_of("all") == frozenset(Topic)
    assert topics_of("graphs, code") == {Topic.GRAPHS, Topic.CODE}
    with pytest.raises(UsageError, match=r"signature, graphs, code, .*, all, separated by commas"):
        topics_of("grahps")


def test_stderr_is_where_it_goes() -> None:
    source = Path(__file__).parents[4] / "src"
    script = (
        "import torch, shoal\n"
        "torch.compile(torch.sin, backend='shoal', options={'cache': False})(torch.ones(2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(source), "SHOAL_LOGS": "signature"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == ""
    assert done.stderr == (
        "[shoal.compile.signature] graph 0: signature, inference, grad mode on\n"
        "  argument 0: input 0\n"
        "  input 0: tensor\n"
        "  output 0: made by the graph\n"
    )

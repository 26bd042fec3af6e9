import json
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.bench.figures import ComputeRound
from shoal.bench.script import built, flags, on_ranks, run_of, store, turns
from shoal.bench.worker import Stage
from shoal.errors import UsageError


def test_every_second_round_is_in_reverse() -> None:
    assert list(turns("ab", 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_flags_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    parser = flags("What it does.\n\nAnd more.", rounds=3, quick="tiny models")
    assert parser.description == "What it does."
    assert parser.parse_args(["--quick"]) == Namespace(rounds=3, quick=True, out=None)
    with pytest.raises(SystemExit):
        flags(None, rounds=3).parse_args(["--quick"])
    monkeypatch.setattr("sys.argv", ["here.py", "--rounds", "2"])
    store(parser.parse_args(["--out", str(out)]).out, ms={"a": 1.5})
    found = json.loads(out.read_text())
    assert list(found) == ["command", "created", "host", "ms"]
    assert (found["command"], found["ms"]) == ("python here.py --rounds 2", {"a": 1.5})
    assert found["host"]["torch"] == torch.__version__
    store(None, ms=1)
    assert os.listdir(tmp_path) == ["found.json"]


@pytest.mark.parametrize("engine", ["plain", "shoal"])
def test_an_engine_in_this_process(engine: str) -> None:
    threads = torch.get_num_threads()
    try:
        with built(run_of("B4", engine, quick=True)) as worker:
            assert dist.is_initialized() == (engine == "shoal")
            assert isinstance(worker.answer(Stage.COMPUTE), ComputeRound)
            calls: list[str] = []

            def note(name: str, function, *arguments: object) -> object:
                calls.append(name)
                return function(*arguments)

            worker.workbench.take_apart(
                2,
                lambda *given: note("forward", *given),
                lambda *given: note("backward", *given),
            )
            assert calls == ["forward", "backward"] * 2
        assert not dist.is_initialized()
    finally:
        torch.set_num_threads(threads)


def test_real_ranks_are_refused() -> None:
    message = "B6a shoal eager needs real ranks"
    with pytest.raises(UsageError, match=message), built(run_of("B6a", "shoal", quick=True)):
        pass
    with pytest.raises(UsageError, match="unknown case B7"):
        run_of("B7", "shoal")


def _sum(start: int) -> list[float]:
    value = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(value)
    return [value.item(), dist.get_world_size(), torch.get_num_threads()]


def test_rank_0_answers_for_all() -> None:
    assert on_ranks(2, _sum, 10) == [21.0, 2, 1]

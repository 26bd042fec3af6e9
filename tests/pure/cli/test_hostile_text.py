"""`config.json` and `metrics.jsonl` may hold anything: it is refused or left out, never raised."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoal.checkpoint import save_training, step_folder
from shoal.cli.main import main
from shoal.errors import CheckpointError
from shoal.report import write_report
from shoal.report.metrics import StepRecord, read_metrics
from shoal.train.checkpoints import read_progress
from shoal.train.config import TrainConfig
from shoal.train.journal import MetricsFile
from shoal.train.options import options_of, to_json

TINY = ["--dim", "8", "--layers", "1", "--heads", "2", "--context", "8", "--device", "cpu"]
PROGRESS = {"step": 7, "samples": 28, "tokens": 700, "data_digest": "x", "scale": {}}
PATHS = [found.path for found in options_of(TrainConfig)]

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**63, 2**53, 10**4299, 0, 1]),
    st.floats(),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324]),
    st.text(max_size=20),
    st.sampled_from(["\0", "\ud800", "\x1b]0;x\a", "auto", "cpu", "cuda", "[bold]"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
DEEP = "[" * 900 + "]" * 900


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder with a checkpoint at step 7 of 10."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("some text " * 50)
    folder = tmp_path / "runs" / "x"
    folder.mkdir(parents=True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_training(step_folder(folder / "checkpoints", 7), model, optimizer, PROGRESS)
    return folder


def good_config() -> dict[str, Any]:
    tree = to_json(TrainConfig())
    tree["model"] |= {"dim": 8, "layers": 1, "heads": 2, "context": 8}
    tree["data"]["folder"] = "data"
    tree["parallel"]["device"] = "cpu"
    tree["run"]["steps"] = 10
    return tree


def resume(capsys) -> int:
    """The status of a resume that only checks; 2 comes with one message."""
    status = main(["train", "--dry-run", "--resume", "runs/x"])
    err = capsys.readouterr().err
    assert (status == 0) == (err == "")
    assert status in (0, 1, 2)
    assert "\x1b" not in err
    assert "Traceback" not in err
    return status


def test_the_run_that_is_damaged_below_could_go_on(run, capsys):
    (run / "config.json").write_text(json.dumps(good_config()))
    assert resume(capsys) == 0


SLOW = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SLOW
@given(path=st.sampled_from(PATHS), value=VALUES)
@example(path=("optim", "clip"), value=10**400)
@example(path=("run", "accumulate"), value=10**400)
@example(path=("data", "max_bytes"), value=2**62)
@example(path=("data", "folder"), value="a\0b")
@example(path=("data", "folder"), value="\ud800")
def test_any_value_of_any_option_is_taken_or_refused(run, capsys, path, value):
    tree = good_config()
    tree[path[0]][path[1]] = value
    (run / "config.json").write_text(json.dumps(tree))
    resume(capsys)
    write_report(run)


@SLOW
@given(tree=VALUES)
def test_any_json_in_place_of_a_config_is_refused(run, capsys, tree):
    (run / "config.json").write_text(json.dumps(tree))
    resume(capsys)
    write_report(run)


@pytest.mark.parametrize(
    "text",
    [
        *(DEEP, "[" * 100_000, '{"run": {"steps": ' + DEEP + "}}", '{"a":' * 900 + "1" + "}" * 900),
        *("{" * 10_000, '{"run": ' * 300 + "1" + "}" * 300, '{"x": "' + "y" * (1 << 21) + '"}'),
        *('{"run": {"steps": 1e999}}', '{"run": {"steps": ' + "9" * 5000 + "}}", ""),
    ],
    ids=range(10),
)
def test_deep_long_and_broken_configs_are_refused(run, capsys, text):
    (run / "config.json").write_text(text)
    assert resume(capsys) == 2
    write_report(run)


@SLOW
@given(data=st.binary(max_size=200))
def test_any_bytes_in_place_of_a_config_are_refused(run, capsys, data):
    (run / "config.json").write_bytes(data)
    assert resume(capsys) in (0, 2)  # `{}` is a config: that of the defaults
    write_report(run)


FIELDS = [
    *("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_ms", "compute_ms"),
    *("exposed_ms", "optimizer_ms", "memory_bytes", "own_ms", "num_ranks", "kind"),
]
LINES = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["step", "validation", "resume"])},
        optional={name: VALUES for name in FIELDS if name != "kind"},
    ).map(json.dumps),
    st.fixed_dictionaries(
        {
            "kind": st.just("step"),
            "step": st.integers(0, 2**60),
            "loss": st.floats(allow_nan=False, allow_infinity=False),
        },
        optional={name: st.floats(width=64) for name in ("lr", "step_ms", "tokens", "compute_ms")}
        | {name: st.lists(st.floats(), max_size=3) for name in ("memory_bytes", "own_ms")},
    ).map(json.dumps),
    VALUES.map(json.dumps),
    st.text(max_size=30).filter(lambda text: "\ud800" not in text),
)


@SLOW
@given(lines=st.lists(LINES, max_size=6))
@example(lines=['{"kind": "step", "loss": 1, "step": 1' + "0" * 400 + "}"])
@example(lines=[f'{{"kind": "step", "loss": 1.6e308, "step": {step}}}' for step in (1, 2)])
@example(lines=[f'{{"kind": "step", "loss": 1, "step": {2**53 - 1}}}'])
@example(lines=[DEEP, "[" * 100_000, '{"step": ' + DEEP + "}", '{"step": ' + "9" * 5000 + "}"])
@example(lines=['{"kind": "resume", "step": 1, "num_ranks": 1' + "0" * 400 + "}"])
@example(lines=['{"kind": "step", "step": 1, "loss": 1, "memory_bytes": [1e308, 1e308, -1e308]}'])
def test_any_lines_of_metrics_are_drawn_or_left_out(run, lines):
    path = run / "metrics.jsonl"
    path.write_text("\n".join(lines) + "\n", errors="replace")
    write_report(run)
    found = read_metrics(path)
    assert len(found.steps) + len(found.validations) <= len(lines)
    metrics = MetricsFile(path, start_step=7, num_ranks=2)
    metrics.on_step(StepRecord(step=8, loss=1.0), ())
    metrics.close()
    write_report(run)
    assert [record.step for record in read_metrics(path).steps][-1] == 8


def test_a_line_without_end_is_left_out_and_the_next_is_read(run):
    path = run / "metrics.jsonl"
    good = '{"kind": "step", "step": 2, "loss": 1.0}\n'
    long = '{"kind": "step", "step": 1, "loss": 1, "x": "' + "y" * (1 << 22) + '"}\n'
    path.write_text(long + good)
    found = read_metrics(path)
    assert [record.step for record in found.steps] == [2]
    assert len(found.problems) == 1


@SLOW
@given(name=st.sampled_from([*PROGRESS, "factor", "good_steps", "is_dynamic"]), value=VALUES)
def test_any_progress_in_a_checkpoint_is_taken_or_refused(run, name, value):
    checkpoint = run / "checkpoints" / "step-00000007"
    manifest = checkpoint / "manifest.json"
    original = manifest.read_bytes()
    tree = json.loads(original)
    own = tree["extra"]["training"]
    (own if name in PROGRESS else own["scale"])[name] = value
    try:
        manifest.write_text(json.dumps(tree))
        assert read_progress(checkpoint).step >= 0
    except CheckpointError:
        pass
    finally:
        manifest.write_bytes(original)

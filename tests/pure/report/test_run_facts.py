"""What the report tells of a run beside its curves: where, when, how fast, other ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pure.report.runs import ACTIONS, CONFIG, make_run, step_line
from shoal.report.page import render
from shoal.report.recorded_run import MOST_OTHERS, read_recorded_run
from shoal.report.throughput import throughput

FACTS = {
    **CONFIG,
    "num_ranks": 2,
    "model": {"dim": 256, "layers": 4, "context": 128},
    "precision": "bf16",
    "started": "2026-01-02 03:04:05+00:00",
    "command": "shoal train --name <demo>",
    "host": "node7",
    "torch": "2.13.0",
}


def with_timeline(folder: Path, number: int, **fields: object) -> None:
    name = f"logs/timeline-rank-{number}.json" if number else "timeline.json"
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(
        json.dumps({"step": 3, "rank": number, "actions": ACTIONS, **fields})
    )


def test_facts_of_the_run_are_told(tmp_path: Path) -> None:
    html = render(read_recorded_run(make_run(tmp_path / "run", config=FACTS)))
    for text in ("2026-01-02 03:04:05+00:00", "shoal train --name &lt;demo&gt;", "node7", "2.13.0"):
        assert text in html


def test_a_run_without_facts_says_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", config={"device": "cpu"})
    html = render(read_recorded_run(folder))
    assert "config.json does not say when and where it ran" in html


@pytest.mark.parametrize(("device", "peak"), [("NVIDIA H200", 989.0), ("NVIDIA A100-SXM4", 312.0)])
def test_mfu_is_of_the_devices_peak(tmp_path: Path, device: str, peak: float) -> None:
    folder = make_run(tmp_path / "run", config=FACTS)
    with_timeline(folder, 0, device=device)
    run = read_recorded_run(folder)
    found = throughput(run, 1e6)
    assert found is not None
    by_hand = (6 * 6_342_912 + 12 * 4 * 256 * 128) * 1e6 / 2 / 1e12
    assert found.tflops_per_s == pytest.approx(by_hand)
    assert found.mfu == pytest.approx(by_hand / peak)


@pytest.mark.parametrize(
    "changed", [{"precision": "fp32"}, {"num_ranks": 0}, {"num_ranks": "2"}, {"model": {}}]
)
def test_what_is_not_known_is_not_guessed(tmp_path: Path, changed: dict[str, object]) -> None:
    folder = make_run(tmp_path / "run", config={**FACTS, **changed})
    with_timeline(folder, 0, device="NVIDIA H200")
    found = throughput(read_recorded_run(folder), 1e6)
    assert found is None or found.mfu is None
    assert "MFU" not in render(read_recorded_run(folder)) or "not known" in render(
        read_recorded_run(folder)
    )


def test_other_ranks_have_lanes_of_the_same_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", config=FACTS)
    with_timeline(folder, 0)
    with_timeline(folder, 1, host="<node8>")
    with_timeline(folder, 2, step=99)  # of a run on more ranks, before
    with_timeline(folder, 3, rank=1)  # says that it is another rank's
    with_timeline(folder, MOST_OTHERS + 1)
    run = read_recorded_run(folder)
    assert [other.rank for other in run.other_timelines] == [1]
    html = render(run)
    assert "Show rank 1 on &lt;node8&gt;" in html
    assert "Show rank 2" not in html


def test_overlap_is_told(tmp_path: Path) -> None:
    html = render(read_recorded_run(make_run(tmp_path / "run")))
    # In flight 800 µs, waited for in 400 of them; 500 µs, and 400.
    assert "Overlapped with compute: 50 % of gathers, 20 % of reductions." in html


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [("inductor", "The model was compiled"), ("off", "one rank has nothing")],
)
def test_empty_lanes_have_a_reason(tmp_path: Path, compiled: str, reason: str) -> None:
    alone = [one for one in ACTIONS if one["kind"] in ("forward", "backward", "optimizer")]
    folder = make_run(tmp_path / "run", config={**CONFIG, "compile": compiled}, actions=alone)
    assert reason in render(read_recorded_run(folder))


def test_spans_can_be_reached_by_keys_and_read_as_a_table(tmp_path: Path) -> None:
    lines = [step_line(step) for step in range(1, 4)]
    html = render(read_recorded_run(make_run(tmp_path / "run", lines=lines)))
    assert '<div class="spans" tabindex="0" role="group"' in html
    assert html.count("<tr><td>") == len(ACTIONS)

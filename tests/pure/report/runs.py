"""Run folders for the report's tests."""

from __future__ import annotations

import json
from pathlib import Path

CONFIG: dict[str, object] = {
    "name": "demo",
    "device": "cpu",
    "num_parameters": 6_342_912,
    "started": "2026-01-02 03:04:05+00:00",
    "command": "shoal train --name demo",
    "model": {"dim": 256},
}

ACTIONS: list[dict[str, object]] = [
    {"kind": "gather", "unit": "layers.0", "start_us": 100.0, "end_us": 900.0},
    {"kind": "wait", "unit": "layers.0", "start_us": 500.0, "end_us": 900.0},
    {"kind": "forward", "unit": "layers.0", "start_us": 900.0, "end_us": 4100.0},
    {"kind": "backward", "unit": "layers.0", "start_us": 4100.0, "end_us": 9100.0},
    {"kind": "reduce", "unit": "layers.0", "start_us": 9100.0, "end_us": 9600.0},
    {"kind": "finish", "unit": "layers.0", "start_us": 9200.0, "end_us": 9600.0},
    {"kind": "optimizer", "unit": "", "start_us": 9600.0, "end_us": 10100.0},
]


def step_line(step: int, **changed: object) -> str:
    fields: dict[str, object] = {
        "kind": "step",
        "step": step,
        "loss": 5.0 / step,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "tokens": 4096 * step,
        "tokens_per_s": 20_000.0,
        "step_ms": 200.0,
        "compute_ms": 150.0,
        "exposed_ms": 30.0,
        "optimizer_ms": 20.0,
        "memory_bytes": [300 * 2**20, 310 * 2**20],
    }
    return json.dumps(fields | changed) + "\n"


def make_run(
    folder: Path,
    *,
    lines: list[str] | None = None,
    config: object = CONFIG,
    actions: list[dict[str, object]] | None = ACTIONS,
    sample: str | None = "def f():\n    return 1\n",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    lines = [step_line(step) for step in range(1, 31)] if lines is None else lines
    (folder / "metrics.jsonl").write_text("".join(lines))
    if actions is not None:
        timeline = {"step": 3, "rank": 1, "actions": actions}
        (folder / "timeline.json").write_text(json.dumps(timeline))
    if sample is not None:
        (folder / "sample.txt").write_text(sample)
    return folder

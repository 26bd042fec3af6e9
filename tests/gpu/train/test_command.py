"""`shoal train` on CUDA: NCCL, bf16, and what it says when there are too few devices."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

SOURCE = Path(__file__).parents[3] / "src"
TINY = [
    *("--dim", "64", "--layers", "2", "--heads", "2", "--context", "32", "--batch-size", "8"),
    *("--device", "cuda", "--validate-every", "0", "--sample-tokens", "8", "--max-bytes", "50000"),
]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shoal", "train", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_run_trains_and_resumes_in_bf16(tmp_path: Path) -> None:
    for arguments in (
        ["--name", "a", "--nproc", "1", "--steps", "20", *TINY],
        ["--resume", "runs/a", "--steps", "+10"],
    ):
        process = start(tmp_path, *arguments)
        out, err = process.communicate(timeout=110)
        assert process.returncode == 0, out + err
    folder = tmp_path / "runs" / "a"
    steps = [
        record
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if (record := json.loads(line))["kind"] == "step"
    ]
    assert [record["step"] for record in steps] == list(range(1, 31))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert steps[-1]["memory_bytes"][0] > 0
    config = json.loads((folder / "config.json").read_text())
    assert config["parallel"]["precision"] == "bf16"
    assert (folder / "report.html").exists()


def test_more_ranks_than_devices_is_one_message(tmp_path: Path) -> None:
    num_ranks = torch.cuda.device_count() + 1
    process = start(tmp_path, "--name", "a", "--nproc", str(num_ranks), "--batch-size", "64", *TINY)
    out, err = process.communicate(timeout=110)
    assert process.returncode == 2, out + err
    assert len(err.strip().splitlines()) == 1
    assert str(num_ranks) in err
    assert str(torch.cuda.device_count()) in err


def test_ctrl_c_saves(tmp_path: Path) -> None:
    process = start(tmp_path, "--name", "a", "--nproc", "1", "--steps", "1000000", *TINY)
    metrics = tmp_path / "runs" / "a" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert list((tmp_path / "runs" / "a" / "checkpoints").glob("step-*"))

"""A run that loses ranks and is started again ends as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from train_command import SOURCE, TINY, TORCHRUN, steps_in, wait_for_steps, wait_until

SCRIPT = Path(__file__).with_name("losing_ranks.py")

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds the ranks of a command in /proc"
)


def lose_ranks(folder: Path, kills: int, seed: int, timeout_s: float, *how: str) -> int:
    """Return how often the run went on from a checkpoint; the script compares all the rest."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(kills), str(seed), *how],
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    found = re.search(rf"{kills} kills, (\d+) resumes", done.stdout)
    assert found, done.stdout + done.stderr[-5000:]
    return int(found[1])


@pytest.mark.timeout(240)  # 28 processes one after the other, on a machine that may be busy
def test_five_kills_change_nothing(tmp_path: Path) -> None:
    assert lose_ranks(tmp_path, 5, 1, 220) >= 3


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10))
def test_twenty_kills_change_nothing(tmp_path: Path, seed: int) -> None:
    assert lose_ranks(tmp_path, 20, 100 + seed, 1100) >= 10


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_any_moment_change_nothing(tmp_path: Path, seed: int) -> None:
    """How often there is a checkpoint to go on from depends on how fast the machine is."""
    lose_ranks(tmp_path, 20, 200 + seed, 1100, "moments")


@pytest.mark.timeout(480)
@pytest.mark.parametrize("launcher", ["shoal", pytest.param("torchrun", marks=pytest.mark.soak)])
def test_the_command_goes_on_after_a_kill(tmp_path, start, launcher):
    folder = tmp_path / "runs" / "a"
    flags = ("--name", "a", "--steps", "1000000", "--save-every", "5", *TINY)
    if launcher == "shoal":
        command = start(*flags, "--ranks", "2", "--max-restarts", "2")
    else:
        command = start(*flags, launcher=(*TORCHRUN, "--max-restarts", "2"))
    wait_for_steps(folder, 12, timeout_s=120)
    os.kill(command.ranks()[1], signal.SIGKILL)
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: '"resume"' in metrics.read_text(), timeout_s=120)
    wait_for_steps(folder, 30, timeout_s=120)
    command.process.send_signal(signal.SIGINT)
    status, out, err = command.finish(timeout_s=120)
    done = steps_in(folder)
    assert done == list(range(1, len(done) + 1))
    assert "resumed from" in out
    assert (folder / "checkpoints" / f"step-{done[-1]:08d}").is_dir()
    if launcher == "shoal":
        assert status == 130
        assert err == "stopping after this step, then saving; Ctrl-C again quits at once\n"


@pytest.mark.timeout(300)
def test_an_error_that_would_come_back_is_not_tried_again(tmp_path, start):
    """A damaged checkpoint is damaged for those who are started again, too."""
    status, _, err = start("--name", "a", "--steps", "2", *TINY, "--nproc", "1").finish(120)
    assert (status, err) == (0, "")
    (shard,) = (tmp_path / "runs" / "a" / "checkpoints").glob("step-*/*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    flags = ("--resume", "runs/a", "--steps", "+1", "--nproc", "1", "--max-restarts", "3")
    status, _, err = start(*flags).finish(timeout_s=120)
    assert status == 1
    assert shard.name in err
    assert not list((tmp_path / "runs" / "a" / "logs").glob("*restart*"))

"""`shoal train` as a command: it launches ranks, and survives or reports what happens to them."""

import os
import signal
import time
from pathlib import Path

import pytest

from train_command import FOREVER, TINY, TORCHRUN, alive, steps_in, wait_for_steps, wait_until

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds the ranks of a command in /proc"
)


def test_ctrl_c_saves_and_the_run_can_be_resumed(tmp_path, start):
    folder = tmp_path / "runs" / "a"
    command = start("--name", "a", *FOREVER, *TINY)
    wait_for_steps(folder)
    # A terminal sends one to each process of the group; `timeout` and others send a second.
    os.killpg(command.process.pid, signal.SIGINT)
    command.process.send_signal(signal.SIGINT)
    status, out, err = command.finish()
    assert status == 130
    assert err == "stopping after this step, then saving; Ctrl-C again quits at once\n"
    done = steps_in(folder)[-1]
    assert f"stopped as asked  step {done} of 1000000" in out
    assert "shoal train --resume runs/a\n" in out
    assert (folder / "checkpoints" / f"step-{done:08d}").is_dir()
    assert (folder / "report.html").exists()

    more = ("--steps", "+3", "--nproc", "1", "--forecast", "on")
    status, out, err = start("--resume", "runs/a", *more).finish()
    assert (status, err) == (0, "")
    assert f"resumed from runs/a/checkpoints/step-{done:08d} at step {done}" in out
    assert "resume      shoal train --resume runs/a --steps +100" in out
    assert steps_in(folder) == list(range(1, done + 4))
    assert (folder / "sample.txt").exists()
    assert "allocated_peak_bytes" in (folder / "forecast.json").read_text()
    assert "Forecast and measured" in (folder / "report.html").read_text()

    # A bit flipped in the checkpoint is found by the ranks and told once.
    (shard,) = (folder / "checkpoints" / f"step-{done + 3:08d}").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    config = (folder / "config.json").read_text()
    status, _, err = start("--resume", "runs/a", "--steps", "+3", "--lr", "0.5").finish()
    assert status == 1
    assert (folder / "config.json").read_text() == config, "a failed resume changes nothing"
    assert err.count("shoal: error:") == 1
    assert shard.name in err
    assert "Traceback" not in err
    assert "Traceback" in (folder / "logs" / "rank-0.err").read_text()


def test_a_run_that_lost_its_config_is_resumed_by_its_checkpoint(tmp_path, start):
    folder = tmp_path / "runs" / "a"
    assert start("--name", "a", "--steps", "2", *TINY).finish()[0] == 0
    (folder / "config.json").unlink()
    status, _, err = start("--resume", "runs/a", "--steps", "+1").finish()
    assert (status, err) == (0, "")
    assert steps_in(folder) == [1, 2, 3]
    assert (folder / "config.json").exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path, start, number):
    command = start("--name", "a", *FOREVER, *TINY)
    wait_for_steps(tmp_path / "runs" / "a")
    ranks = command.ranks()
    assert len(ranks) == 2
    os.kill(ranks[1], number)
    began_at = time.monotonic()
    status, _, err = command.finish(timeout_s=30)
    assert time.monotonic() - began_at < 30
    assert status == 1
    who = f"rank 1 (local rank 1, pid {ranks[1]})"
    assert err.startswith(f"shoal: error: {who} died with {number.name}.")
    assert err.count("\n") == 2
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.timeout(240)  # three commands at once, which a busy machine takes minutes for
def test_ranks_do_not_outlive_their_launcher(tmp_path, start):
    command = start("--name", "a", *FOREVER, *TINY)
    wait_for_steps(tmp_path / "runs" / "a")
    ranks = command.ranks()
    assert len(ranks) == 2
    # Meanwhile nobody else may write there.
    for arguments in (["--resume", "runs/a"], ["--name", "a", "--overwrite", *TINY]):
        status, _, err = start(*arguments).finish()
        assert status == 2
        assert f"runs/a is in use by process {command.process.pid} on" in err
    assert all(alive(pid) for pid in ranks)
    command.process.kill()
    command.finish()
    wait_until(lambda: not any(alive(pid) for pid in ranks), timeout_s=10)


def test_insisting_ends_the_run_at_once(tmp_path, start):
    command = start("--name", "a", *FOREVER, *TINY)
    wait_for_steps(tmp_path / "runs" / "a")
    ranks = command.ranks()
    os.kill(ranks[0], signal.SIGSTOP)  # a step that never ends
    command.process.send_signal(signal.SIGINT)
    time.sleep(2.2)
    command.process.send_signal(
        signal.SIGINT
    )  # the launcher lets the stopped rank go on to its end
    status, _, err = command.finish(timeout_s=30)
    assert status == 130
    assert "stopped at once. There is no checkpoint yet." in err
    assert not any(alive(pid) for pid in ranks)


def test_a_closed_terminal_stops_the_run_and_a_closed_pipe_does_not(tmp_path, start):
    folder = tmp_path / "runs" / "a"
    command = start("--name", "a", *FOREVER, *TINY)
    wait_for_steps(folder, 1)
    assert command.process.stdout is not None
    assert command.process.stderr is not None
    command.process.stdout.close()
    command.process.stderr.close()
    wait_for_steps(folder, len(steps_in(folder)) + 200)
    command.process.send_signal(signal.SIGHUP)
    assert command.process.wait(timeout=60) == 130
    assert (folder / "checkpoints" / f"step-{steps_in(folder)[-1]:08d}").is_dir()
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_torchrun_saves_when_it_is_asked_to_stop(tmp_path, start, number):
    folder = tmp_path / "runs" / "a"
    command = start("--name", "a", *FOREVER, *TINY, launcher=TORCHRUN)
    wait_for_steps(folder)
    command.process.send_signal(number)
    status, out, _ = command.finish()
    assert status != 0
    done = steps_in(folder)[-1]
    assert f"stopped as asked  step {done} of 1000000" in out
    assert (folder / "checkpoints" / f"step-{done:08d}").is_dir()


def test_torchrun_starts_the_same_command(tmp_path, start):
    status, out, _ = start("--name", "a", "--steps", "4", *TINY, launcher=TORCHRUN).finish()
    assert status == 0
    assert "2 ranks on cpu in fp32" in out
    assert out.count("finished    step 4 of 4") == 1
    assert steps_in(tmp_path / "runs" / "a") == [1, 2, 3, 4]

"""What the launcher opens to others, and what it says of stopped ranks and lost folders."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from train_command import FOREVER, SOURCE, TINY, TORCHRUN, alive, wait_for_steps, wait_until

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="finds ranks and their sockets in /proc"
)
LISTENING = "0A"
LIMIT_S = 4.0


def addresses_of(pids: list[int]) -> set[str]:
    """Where these processes listen: the address of each socket, as /proc/net writes it."""
    inodes = {inode for pid in pids for inode in sockets_of(pid)}
    found = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (name.startswith("udp") or fields[3] == LISTENING):
                found.add(fields[1].partition(":")[0])
    return found


def sockets_of(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            kind, _, inode = os.readlink(link).partition("socket:[")
        except OSError:
            continue
        if not kind:
            yield inode.rstrip("]")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_nothing_listens_where_another_machine_could_connect(tmp_path, start, num_ranks):
    flags = ("--name", "a", "--ranks", str(num_ranks), *FOREVER, *TINY)
    command = start(*flags, "--replicas", "2")
    wait_for_steps(tmp_path / "runs" / "a")
    ranks = command.ranks()
    assert len(ranks) == num_ranks
    assert addresses_of([command.process.pid]) == set(), "the launcher needs no socket"
    assert addresses_of(ranks) == {"0100007F"}, "127.0.0.1, where gloo's pairs meet"
    environment = Path(f"/proc/{ranks[0]}/environ").read_bytes().split(b"\0")
    (store,) = [
        Path(os.fsdecode(entry.partition(b"=")[2]))
        for entry in environment
        if entry.startswith(b"SHOAL_STORE=")
    ]
    assert stat.S_IMODE(store.stat().st_mode) == 0o600
    for folder in (store.parent, store.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    command.process.send_signal(signal.SIGTERM)
    assert command.finish()[0] == 130
    assert not store.parent.parent.exists()


def test_ranks_import_nothing_from_the_working_folder(tmp_path):
    """A folder that came from somebody else may hold a `torch.py`."""
    (tmp_path / "torch.py").write_text("import pathlib; pathlib.Path('taken').touch()")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shoal", "train", "--name", "a", "--steps", "1", *TINY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "taken").exists()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_in_time(tmp_path, start, victim):
    command = start("--name", "a", *FOREVER, *TINY, "--stall-limit", str(LIMIT_S))
    wait_for_steps(tmp_path / "runs" / "a")
    ranks = command.ranks()
    os.kill(ranks[victim], signal.SIGSTOP)
    began_at = time.monotonic()
    status, _, err = command.finish(timeout_s=60)
    assert time.monotonic() - began_at < LIMIT_S + 2 + _slack_s()
    assert status == 1
    who = f"rank {victim} (local rank {victim}, pid {ranks[victim]})"
    assert err.startswith(f"shoal: error: {who} was stopped by a signal"), err
    assert f"rank {victim} does not answer" in err
    assert "SIGKILL" not in err
    assert "out of memory" not in err
    assert not any(alive(pid) for pid in ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rank_that_is_stopped_before_it_trains_is_named_in_time(start, num_ranks):
    ranks_flag = ("--ranks", str(num_ranks))
    command = start("--name", "a", *FOREVER, *TINY, *ranks_flag, "--stall-limit", str(LIMIT_S))
    wait_until(lambda: len(command.ranks()) == num_ranks)
    victim = command.ranks()[0]
    os.kill(victim, signal.SIGSTOP)
    began_at = time.monotonic()
    status, _, err = command.finish(timeout_s=60)
    assert time.monotonic() - began_at < LIMIT_S + 2 + _slack_s()
    assert status == 1
    assert err.startswith(f"shoal: error: rank 0 (local rank 0, pid {victim}) was stopped"), err


def _slack_s() -> float:
    """What a busy machine adds to a limit."""
    return 0 if os.getloadavg()[0] < 2 * (os.cpu_count() or 1) else 10


@pytest.mark.parametrize("save_every", ["0", "1"])
@pytest.mark.parametrize("launcher", ["shoal", "torchrun"])
def test_a_removed_run_folder_ends_the_run(tmp_path, start, launcher, save_every):
    folder = tmp_path / "runs" / "a"
    flags = ("--name", "a", "--steps", "1000000", "--save-every", save_every, *TINY)
    command = start(*flags, launcher=TORCHRUN if launcher == "torchrun" else ())
    wait_for_steps(folder, 5)
    shutil.rmtree(folder, ignore_errors=True)
    began_at = time.monotonic()
    status, _, err = command.finish(timeout_s=60)
    assert time.monotonic() - began_at < 10 + _slack_s()
    assert status == 1
    assert "runs/a was removed, or replaced, while a run wrote into it" in err
    # A save that was in flight may have ended while its folder was being removed.
    left = [path.name for path in (folder / "checkpoints").glob("*")]
    assert all(name == "latest" or name.startswith("step-") for name in left), left
    if any(name != "latest" for name in left):
        resumed = start("--resume", "runs/a", "--steps", "+1").finish()
        assert (resumed[0], resumed[2]) == (0, "")
    else:
        assert not folder.exists() or left == ["latest"]


def test_a_folder_that_another_run_took_stays_as_it_is(tmp_path, start):
    folder, aside = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    command = start("--name", "a", *FOREVER, *TINY)
    wait_for_steps(folder)
    folder.rename(aside)
    shutil.copytree(aside, folder)
    content = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    status, _, err = command.finish(timeout_s=60)
    assert status == 1
    assert "removed, or replaced" in err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == content


def test_a_rank_that_cannot_be_started_is_told(tmp_path, start):
    command = start("--name", "a", "--steps", "1", *TINY)
    wait_until(lambda: (tmp_path / "runs" / "a").exists())
    assert command.finish()[0] == 0
    logs = tmp_path / "runs" / "a" / "logs"
    (logs / "rank-1.err").unlink()
    (logs / "rank-1.err").mkdir()
    status, _, err = start("--resume", "runs/a", "--steps", "+1").finish()
    assert status == 1
    assert "shoal: error: cannot start rank 1 with its log in runs/a/logs: Is a directory" in err

"""Two hosts whose link is cut in the middle of a step: both say so, and go on when it is back.

The hosts are network namespaces of this machine, joined by a pair of virtual interfaces.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from train_command import SOURCE, TINY, steps_in, wait_for_steps, wait_until

LIMIT_S = 5.0
ADDRESSES = ("10.77.13.1", "10.77.13.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def can_make_hosts() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"shoal-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


class Host:
    """A namespace with one end of the link."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"shoal-{os.getpid()}-{number}"
        self.interface = f"shoal{number}"
        # Names of both, so that nobody asks a server that cannot be reached from here.
        self.etc = Path("/etc/netns") / self.name
        self.etc.mkdir(parents=True)
        lines = [f"{address} shoal-host-{i}\n" for i, address in enumerate(ADDRESSES)]
        (self.etc / "hosts").write_text(Path("/etc/hosts").read_text() + "".join(lines))
        ip("netns", "add", self.name)

    def kill_all(self) -> None:
        """End whatever runs here, ranks whose launcher is gone included."""
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        for pid in map(int, pids.stdout.split()):
            os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        ip("netns", "del", self.name)
        shutil.rmtree(self.etc)

    def configure(self) -> None:
        ip("-n", self.name, "addr", "add", f"{ADDRESSES[self.number]}/24", "dev", self.interface)
        ip("-n", self.name, "link", "set", self.interface, "up")
        ip("-n", self.name, "link", "set", "lo", "up")

    def set_link(self, state: str) -> None:
        ip("-n", self.name, "link", "set", self.interface, state)

    def start(self, folder: Path, *arguments: str) -> subprocess.Popen:
        launcher = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3")
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29713")
        words = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"]
        words += [*launcher, *meeting, "--rdzv-id", "two-hosts"]
        words += ["--rdzv-conf", f"is_host={int(self.number == 0)}"]
        words += ["--local-addr", ADDRESSES[self.number], "-m", "shoal", "train", *arguments]
        with (
            (folder / f"host-{self.number}.out").open("w") as out,
            (folder / f"host-{self.number}.err").open("w") as err,
        ):
            return self._popen(words, folder, out, err)

    def _popen(self, words: list[str], folder: Path, out: TextIO, err: TextIO) -> subprocess.Popen:
        return subprocess.Popen(
            words,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(SOURCE),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": self.interface,
            },
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    hosts: list[Host] = []
    try:
        hosts = [Host(0), Host(1)]
        first, second = hosts
        near, far = (first.interface, first.name), (second.interface, second.name)
        ip(
            "link",
            "add",
            near[0],
            "netns",
            near[1],
            "type",
            "veth",
            "peer",
            far[0],
            "netns",
            far[1],
        )
        for host in hosts:
            host.configure()
        yield first, second
    finally:
        for host in hosts:
            host.remove()


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_make_hosts(), reason="needs root and network namespaces")
def test_a_cut_link_is_reported_by_both_hosts_and_the_run_goes_on(tmp_path):
    folder = tmp_path / "runs" / "a"
    flags = ("--name", "a", "--steps", "1000000", "--save-every", "5", *TINY)
    with two_hosts() as hosts:
        commands = [host.start(tmp_path, *flags, "--stall-limit", f"{LIMIT_S}") for host in hosts]
        try:
            wait_for_steps(folder, 12, timeout_s=150)
            hosts[1].set_link("down")
            cut_at = time.monotonic()
            reports = [tmp_path / f"host-{number}.err" for number in (0, 1)]
            wait_until(lambda: all("has waited" in path.read_text() for path in reports), 120)
            # Two seconds after the limit, and what this machine needs to notice and to write it.
            assert time.monotonic() - cut_at < LIMIT_S + 2 + 3
            assert "does not answer" in reports[0].read_text()
            assert "store of the job cannot be reached" in reports[1].read_text()
            before = steps_in(folder)[-1]
            hosts[1].set_link("up")
            wait_until(lambda: '"resume"' in (folder / "metrics.jsonl").read_text(), 200)
            wait_for_steps(folder, before + 10, timeout_s=150)
            done = steps_in(folder)
            assert done == list(range(1, len(done) + 1))
        finally:
            for host in hosts:
                host.kill_all()
            for command in commands:
                command.wait()

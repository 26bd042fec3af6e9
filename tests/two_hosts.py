"""Two hosts on one machine: network namespaces, joined by a pair of virtual interfaces."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from train_command import SOURCE

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

    def start(self, folder: Path, *program: str) -> subprocess.Popen:
        """Run torchrun with one rank here, which meets the other host's."""
        launcher = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3")
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:29713")
        words = ["ip", "netns", "exec", self.name, sys.executable, "-m", "torch.distributed.run"]
        words += [*launcher, *meeting, "--rdzv-id", "two-hosts"]
        words += ["--rdzv-conf", f"is_host={int(self.number == 0)}"]
        words += ["--local-addr", ADDRESSES[self.number], *program]
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

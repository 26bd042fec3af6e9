"""Jobs whose ranks die: forked off a server that has torch, watched by a real launcher."""

import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from shoal.survive.launcher import Launcher, Start
from survival import program, varieties

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "shoal", "shoal.survive", "survival.program"])


@dataclass(frozen=True)
class Forked:
    """A process of a member, as the launcher wants it."""

    process: BaseProcess

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode


def warm_up() -> None:
    """Start the server, which imports from where this process does."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def run_member(folder: Path, plan: dict[str, Any], variables: dict[str, str]) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the server, which ends with pytest
    os.environ.update(variables)
    log = os.open(
        folder / f"{variables['SHOAL_SURVIVE_MEMBER']}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=log)  # where it hangs
    status = 1
    try:
        (varieties if "variety" in plan else program).main(folder, plan)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    lost: list[int]
    stories: dict[int, Any]
    state: dict[str, torch.Tensor]
    seconds: float

    @property
    def losses(self) -> dict[int, dict[int, str]]:
        """For each step and rank the loss, of those who were there at the end."""
        found: dict[int, dict[int, str]] = {}
        for story in self.stories.values():
            for step, (rank, loss) in story["losses"].items():
                found.setdefault(int(step), {})[rank] = loss
        return found

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        """As one of those has it that were there from the beginning to the end."""
        there = [s for s in self.stories.values() if not s["has_left"]] or self.stories.values()
        return max((s["recoveries"] for s in there), key=len)


def starter(folder: Path, plan: dict[str, Any]) -> Start:
    """Starts members of the job, forked off the server."""
    folder.mkdir(parents=True, exist_ok=True)
    warm_up()

    def start(_: int, variables: Mapping[str, str]) -> Forked:
        process = CONTEXT.Process(target=run_member, args=(folder, plan, dict(variables)))
        process.start()
        return Forked(process)

    return start


@dataclass(frozen=True, kw_only=True)
class Order:
    """Something that happens from outside, so many seconds after the ranks have come to a step."""

    step: int
    victim: int | None = None
    """Who is killed; None: a process is started, which joins."""
    delay_s: float = 0.0


def _step_of(folder: Path) -> int:
    """The last step that a rank has come to."""
    texts = [path.read_text() for path in folder.glob("*.at")]
    return max((int(text) for text in texts if text.strip()), default=-1)


def launch(
    folder: Path,
    num_ranks: int,
    plan: dict[str, Any],
    *,
    num_joining: int = 0,
    leaving: int = -1,
    num_spares: int = 0,
    orders: Sequence[Order] = (),
) -> Outcome:
    """Run the program on ranks that die as planned; wait for those that are left."""
    waiting = sorted(orders, key=lambda order: order.step)
    began = time.monotonic()
    with Launcher(starter(folder, plan), num_ranks, num_spares=num_spares) as launcher:
        try:
            for _ in range(num_joining):
                launcher.join()
            if leaving >= 0:
                launcher.leave(leaving)
            while launcher.poll():
                time.sleep(0.005)
                while waiting and _step_of(folder) >= waiting[0].step:
                    order = waiting.pop(0)
                    time.sleep(order.delay_s)
                    if order.victim is None:
                        launcher.join()
                    else:
                        process = launcher.processes[order.victim]
                        program.kill(folder, order.victim, process.pid)
                if time.monotonic() - began > plan.get("limit_s", 60):
                    for member in launcher.running:
                        os.kill(launcher.processes[member].pid, signal.SIGUSR1)
                    time.sleep(0.5)
                    raise TimeoutError("the job hangs")
        except Exception as error:
            logs = sorted(folder.glob("*.log"))
            error.add_note("\n".join(f"{log.name}:\n{log.read_text()}" for log in logs))
            raise
        lost = launcher.lost
        entered = [m for m in launcher.processes if m not in lost and launcher._has_entered(m)]
        assert all(launcher.processes[member].poll() == 0 for member in entered)
    return outcome_in(folder, lost=lost, seconds=time.monotonic() - began)


def outcome_in(folder: Path, *, lost: list[int], seconds: float = 0.0) -> Outcome:
    """Read what the members have left."""
    return Outcome(
        lost=lost,
        stories={
            int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))
        },
        state=torch.load(folder / "state.pt", map_location="cpu")
        if (folder / "state.pt").exists()
        else {},
        seconds=seconds,
    )

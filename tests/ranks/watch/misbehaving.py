"""Lets one rank of three leave the others in many ways, and collects what the watchdogs say.

    python misbehaving.py FOLDER [NAME ...]

Ranks are forks of this process, several cases at a time, since they mostly wait. Prints a line of
JSON for each case: what every rank reported, and how long after it began to go wrong.
"""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shoal import FSDPModule, fully_shard, replicate
from shoal.comm.observer import waiting
from shoal.comm.transport import Transport
from shoal.train.step import naming_step
from shoal.watch import Watchdog, compare_collectives, digest_of_collectives

NUM_RANKS = 3
LIMIT_S = 2.0
AT_ONCE = 6
STEPS = 3


class Model(nn.Module):
    """Three units, two of them alike, so that swapping their gathers does not hang."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.third = nn.Linear(6, 9)
        self.order = ["first", "second", "third"]
        self.between: Callable[[str], None] = lambda name: None
        self.in_backward: Callable[[str], None] = lambda name: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            self.between(name)
            x = self.get_submodule(name)(x)
            x.register_hook(lambda grad, name=name: self.in_backward(name))
        return x


def note_beginning() -> None:
    """Write down when things begin to go wrong."""
    Path("began").write_text(str(time.monotonic()))


def sleep_at(where: str, name: str) -> None:
    if where == name:
        time.sleep(60)


def die_at(where: str, number: int, name: str) -> None:
    if where == name:
        os.kill(os.getpid(), number)


def fail_at(where: str, error: Exception, name: str) -> None:
    if where == name:
        raise error


def steps_of_units(misbehave: Callable[[Model], None], rank: int, victim: int) -> None:
    """Train sharded units; the victim misbehaves in the second step."""
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    for name in model.order:
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    _steps(model, misbehave, rank, victim)


def steps_of_replicas(misbehave: Callable[[Model], None], rank: int, victim: int) -> None:
    torch.manual_seed(0)
    model = Model()
    replicate(model)
    _steps(model, misbehave, rank, victim)


def _steps(model: Model, misbehave: Callable[[Model], None], rank: int, victim: int) -> None:
    _step(model, 1)  # which takes long, before anybody looks at the clock
    dist.barrier()
    with new_watchdog():
        if rank == victim:
            note_beginning()
            misbehave(model)
        for step in range(2, STEPS + 1):
            _step(model, step)
            _compare()
        time.sleep(5)


def _step(model: Model, step: int) -> None:
    with naming_step(step, model) if isinstance(model, FSDPModule) else nullcontext():
        model(torch.randn(4, 6)).square().sum().backward()


def _compare() -> None:
    """What a training loop does at the end of a step."""
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(NUM_RANKS)]
    with waiting("the digests of all ranks"):
        dist.all_gather(rows, torch.tensor([digest_of_collectives()]))
    if len({row.item() for row in rows}) > 1:
        compare_collectives()


def collectives(own: list[tuple[str, int]], rank: int, victim: int) -> None:
    """Launch collectives by hand: the victim other ones than the rest."""
    dist.barrier()
    with new_watchdog():
        if rank == victim:
            note_beginning()
        _launch(own if rank == victim else USUAL)
        _compare()
        time.sleep(5)


def collectives_of_torch(own: list[tuple[str, int]], rank: int, victim: int) -> None:
    """Go on with a collective that is not in the logs, to which the victim does not come."""
    dist.barrier()
    with new_watchdog():
        _launch(own)
        if rank == victim:
            note_beginning()
            sleep_at("here", "here")
        with waiting("the sum"):
            dist.all_reduce(torch.zeros(4))


def _launch(listed: list[tuple[str, int]]) -> None:
    transport = Transport(dist.group.WORLD)
    for kind, numel in listed:
        if kind == "sleep":
            time.sleep(60)
        elif kind.startswith("gather"):
            output = torch.zeros(NUM_RANKS * numel)
            transport.all_gather(output, torch.zeros(numel), reason=kind).wait()
        elif kind == "reduce":
            full = torch.zeros(NUM_RANKS * numel)
            transport.reduce_scatter(torch.zeros(numel), full, reason="reduction").wait()
        else:
            transport.all_reduce(torch.zeros(numel), reason="all-reduce of b").wait()


def set_order(*names: str) -> Callable[[Model], None]:
    return lambda model: setattr(model, "order", list(names))


def set_between(action: Callable[[str], None]) -> Callable[[Model], None]:
    return lambda model: setattr(model, "between", action)


def fail_inside(model: Model) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("bad sample")

    model.third.forward = fail


def set_in_backward(action: Callable[[str], None]) -> Callable[[Model], None]:
    return lambda model: setattr(model, "in_backward", action)


USUAL = [("gather a", 6), ("reduce", 6), ("all", 8), ("gather b", 4), ("all", 8)]
UNITS, REPLICAS = partial(partial, steps_of_units), partial(partial, steps_of_replicas)
BY_HAND = partial(partial, collectives)
OUTSIDE = partial(partial, collectives_of_torch)

CASES: dict[str, tuple[int, Callable[[int, int], None]]] = {
    # stuck
    "stuck-before-first": (1, UNITS(set_between(partial(sleep_at, "first")))),
    "stuck-before-second": (0, UNITS(set_between(partial(sleep_at, "second")))),
    "stuck-before-third": (2, UNITS(set_between(partial(sleep_at, "third")))),
    "stuck-in-backward": (1, UNITS(set_in_backward(partial(sleep_at, "second")))),
    "stuck-replica": (2, REPLICAS(set_between(partial(sleep_at, "second")))),
    "stuck-by-hand": (1, BY_HAND([*USUAL[:2], ("sleep", 0)])),
    "stuck-outside": (2, OUTSIDE(USUAL[:1])),
    # gone
    "killed": (1, UNITS(set_between(partial(die_at, "second", signal.SIGKILL)))),
    "stopped": (2, UNITS(set_between(partial(die_at, "third", signal.SIGSTOP)))),
    # skipped
    "skipped-unit": (1, UNITS(set_order("first", "third"))),
    "skipped-replica": (0, REPLICAS(set_order("first", "third"))),
    "skipped-first-by-hand": (2, BY_HAND(USUAL[1:])),
    "skipped-reduction-by-hand": (1, BY_HAND([USUAL[0], *USUAL[2:]])),
    # reordered
    "reordered-units": (1, UNITS(set_order("second", "first", "third"))),
    "reordered-units-0": (0, UNITS(set_order("second", "first", "third"))),
    "reordered-by-hand": (2, BY_HAND([USUAL[1], USUAL[0], *USUAL[2:]])),
    # another size
    "larger-gather": (1, BY_HAND([("gather a", 60), *USUAL[1:]])),
    "smaller-all-reduce": (0, BY_HAND([*USUAL[:2], ("all", 2), *USUAL[3:]])),
    "larger-reduction": (2, BY_HAND([USUAL[0], ("reduce", 12), *USUAL[2:]])),
    # raised
    "raised": (1, UNITS(fail_inside)),
    "out-of-memory": (
        2,
        UNITS(set_in_backward(partial(fail_at, "second", MemoryError("no bytes left")))),
    ),
}


def new_watchdog() -> Watchdog:
    return Watchdog(limit_s=LIMIT_S, folder=Path.cwd(), end=report)


def report(text: str) -> None:
    """Write down what this rank learned, and end it."""
    rank = dist.get_rank()
    part = Path(f"{rank}.part")
    part.write_text(json.dumps({"text": text, "at": time.monotonic()}))
    part.rename(f"{rank}.json")
    os._exit(1)


def rank_main(name: str, rank: int, folder: Path) -> None:
    """Run one rank of a case, and write down what it learned."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
    victim, body = CASES[name]
    # A server of torch asks the resolver for the name of every client, which may take 5 s.
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)

    os.chdir(folder)
    try:
        body(rank, victim)
    except Exception as error:
        report(f"{type(error).__name__}: {error}")


def start(name: str, folder: Path) -> list[int]:
    folder.mkdir()
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if not child:
            os.dup2(os.open(str(folder / f"{rank}.err"), os.O_CREAT | os.O_WRONLY), 2)
            try:
                rank_main(name, rank, folder)
            finally:
                os._exit(0)
        children.append(child)
    return children


def finish(name: str, folder: Path, children: list[int]) -> None:
    """Wait for the ranks; one that sleeps, or was stopped, is ended when it has had its time."""
    victim = CASES[name][0]
    deadline = time.monotonic() + 40
    left = set(children)
    while left and time.monotonic() < deadline:
        for child in tuple(left):
            if os.waitpid(child, os.WNOHANG) != (0, 0):
                left.discard(child)
                if left == {children[victim]}:
                    deadline = min(deadline, time.monotonic() + LIMIT_S + 3)
        time.sleep(0.02)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    began = float((folder / "began").read_text())
    told = {}
    for path in sorted(folder.glob("[0-9].json")):
        found = json.loads(path.read_text())
        told[path.stem] = {"text": found["text"], "after_s": found["at"] - began}
    print(json.dumps({"name": name, "victim": victim, "told": told}), flush=True)


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    names = sys.argv[2:] or list(CASES)
    for first in range(0, len(names), AT_ONCE):
        batch = names[first : first + AT_ONCE]
        running = {name: start(name, folder / name) for name in batch}
        for name, children in running.items():
            finish(name, folder / name, children)


if __name__ == "__main__":
    main()

"""Kills one of two ranks at every stage of a save, and looks at what is left.

    python killing.py FOLDER COUNT SEED

Ranks are forks of this process, so that a case takes a fraction of a second. A stage is anything
that a save does to its folder: opening, renaming, syncing, taking the checksum of a block. A save
that is left alone says how many there are for each rank; then COUNT cases are drawn among all
stages of all ranks, of saves in the foreground and in the background, each once before any twice.
"""

import itertools
import os
import random
import signal
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # what the first DTensor imports, for half a second: before forking, once
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shoal.checkpoint import (
    async_save,
    data_files,
    drop_unfinished,
    latest,
    load,
    save,
    step_folder,
)

NUM_RANKS = 2
NEVER = 1 << 30
AT_ONCE = 5
"""Cases that run beside each other: most of their time is waiting for survivors."""

SURVIVORS_S = 0.5
"""How long those who are left may go on before they are ended, as a launcher would do."""


@dataclass(frozen=True)
class Case:
    victim: int
    stage: int
    is_async: bool


def kill_at(stage: int, folder: Path) -> list[int]:
    """Let this process die when a save does its `stage`-th thing; give the count of those left."""
    left = [stage]

    def step() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        is_disk = event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if is_disk and str(folder) in str(arguments[0]):
            step()

    fsync, crc32 = os.fsync, zlib.crc32

    def counted_fsync(descriptor: int) -> None:
        step()
        fsync(descriptor)

    def counted_crc32(*arguments: bytes) -> int:
        step()
        return crc32(*arguments)

    sys.addaudithook(audit)
    os.fsync, zlib.crc32 = counted_fsync, counted_crc32
    return left


def rank_main(rank: int, folder: Path, case: Case) -> None:
    """Save step 1, then step 2, in which the victim dies."""
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    checkpoints = folder / "checkpoints"
    left = [NEVER]
    for step in (1, 2):
        whole = torch.full((8, 4), float(step))
        tensors = {
            "w": distribute_tensor(whole, mesh, [Shard(0)]),
            "p": torch.full((2,), 1.0 * step),
        }
        if step == 2 and rank == case.victim:
            left = kill_at(case.stage, checkpoints)
        if case.is_async:
            async_save(step_folder(checkpoints, step), tensors, {"step": step}).wait()
        else:
            save(step_folder(checkpoints, step), tensors, {"step": step})
    used = case.stage - left[0]
    (folder / f"used-{rank}").write_text(str(used))


def fork(rank: int, folder: Path, case: Case) -> int:
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        rank_main(rank, folder, case)
    finally:
        os._exit(0)


class Run:
    """A case that has begun."""

    def __init__(self, folder: Path, case: Case) -> None:
        folder.mkdir()
        self.folder = folder
        self.case = case
        self.children = [fork(rank, folder, case) for rank in range(NUM_RANKS)]

    def end(self) -> bool:
        """Wait until nobody is left; say whether the victim was killed."""
        _, status = os.waitpid(self.children.pop(self.case.victim), 0)
        was_killed = os.WIFSIGNALED(status)
        deadline = time.monotonic() + SURVIVORS_S
        for child in self.children:
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if was_killed and time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.01)
        return was_killed


def check(folder: Path) -> int:
    """See that the last published checkpoint loads, is of one step, and can be gone on from."""
    checkpoints = folder / "checkpoints"
    newest = latest(checkpoints)
    assert newest is not None, "the first checkpoint is gone"
    found = {"w": torch.zeros(8, 4), "p": torch.zeros(2)}
    extra = load(newest, found)
    step = extra["step"]
    assert newest == step_folder(checkpoints, step)
    assert all(bool(tensor.eq(step).all()) for tensor in found.values()), (newest, found)
    drop_unfinished(checkpoints)
    left = sorted(path.name for path in checkpoints.iterdir())
    assert left == [f"step-{number:08d}" for number in range(1, step + 1)], left
    save(step_folder(checkpoints, 3), found, {"step": 3})
    return step


def every_case(folder: Path) -> list[Case]:
    """All stages of all ranks, in the foreground and in the background."""
    cases = []
    for victim, is_async in itertools.product(range(NUM_RANKS), (False, True)):
        place = folder / f"alone-{victim}-{is_async}"
        Run(place, Case(victim, NEVER, is_async)).end()
        num_stages = int((place / f"used-{victim}").read_text())
        cases += [Case(victim, stage, is_async) for stage in range(num_stages)]
    return cases


def main() -> None:
    data_files.REGION_BYTES = 32
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    choose = random.Random(seed)
    every = every_case(folder)
    drawn = [
        case for _ in range(count // len(every) + 1) for case in choose.sample(every, k=len(every))
    ]
    kills = published = 0
    for start in range(0, count, AT_ONCE):
        cases = enumerate(drawn[start : min(start + AT_ONCE, count)], start)
        for run in [Run(folder / str(index), case) for index, case in cases]:
            try:
                kills += run.end()
                published += check(run.folder) == 2
            except BaseException as error:
                error.add_note(f"{run.folder.name}: {run.case}")
                raise
    print(f"{kills} kills of {count} in {len(every)} stages, {published} published")


if __name__ == "__main__":
    main()

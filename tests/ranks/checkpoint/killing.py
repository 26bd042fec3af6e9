"""Kills one of two ranks at some stage of a save, again and again, and looks at what is left.

    python killing.py FOLDER COUNT SEED

Ranks are forks of this process, so that a case takes a fraction of a second. A stage is anything
that a save does to its folder: opening, renaming, syncing, taking the checksum of a block.
"""

import os
import random
import signal
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from shoal.checkpoint import async_save, drop_unfinished, latest, load, save, step_folder, storage

NUM_RANKS = 2
NUM_STAGES = 24
SURVIVORS_S = 0.7
"""How long those who are left may go on before they are ended, as a launcher would do."""


def kill_at(stage: int, folder: Path) -> None:
    """Let this process die when a save does its `stage`-th thing."""
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


def rank_main(rank: int, folder: Path, victim: int, stage: int, is_async: bool) -> None:
    """Save step 1, then step 2, in which the victim dies."""
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    checkpoints = folder / "checkpoints"
    for step in (1, 2):
        whole = torch.full((8, 4), float(step))
        tensors = {
            "w": distribute_tensor(whole, mesh, [Shard(0)]),
            "p": torch.full((2,), 1.0 * step),
        }
        if step == 2 and rank == victim:
            kill_at(stage, checkpoints)
        if is_async:
            async_save(step_folder(checkpoints, step), tensors, {"step": step}).wait()
        else:
            save(step_folder(checkpoints, step), tensors, {"step": step})


def fork(*arguments: object) -> int:
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        rank_main(*arguments)
    finally:
        os._exit(0)


def run(folder: Path, victim: int, stage: int, is_async: bool) -> bool:
    """Run a case to its end; say whether the victim was killed."""
    folder.mkdir()
    children = [fork(rank, folder, victim, stage, is_async) for rank in range(NUM_RANKS)]
    _, status = os.waitpid(children.pop(victim), 0)
    was_killed = os.WIFSIGNALED(status)
    deadline = time.monotonic() + SURVIVORS_S
    for child in children:
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


def main() -> None:
    storage.BLOCK_BYTES = 32
    folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    choose = random.Random(seed)
    steps = []
    for index in range(count):
        case = {
            "victim": index % NUM_RANKS,
            "stage": choose.randrange(NUM_STAGES),
            "is_async": bool(index // NUM_RANKS % 2),
        }
        try:
            was_killed = run(folder / str(index), **case)
            steps.append((was_killed, check(folder / str(index))))
        except BaseException as error:
            error.add_note(f"case {index}: {case}")
            raise
    kills = sum(was_killed for was_killed, _ in steps)
    print(f"{kills} kills of {count}, {sum(step == 2 for _, step in steps)} published")


if __name__ == "__main__":
    main()

"""Kills a random rank of a training run at a random step, again and again, and lets it go on.

    python losing_ranks.py FOLDER KILLS SEED [moments]

With `moments` it may die before, at any moment: also while ranks start, meet, load or save.

Ranks are forks of this process under torch's elastic agent, so that a start takes a fraction of a
second. The run that lost ranks must end as the unbroken one did: the same losses at the same steps,
and checkpoints that hold the same bytes of weights, optimizer and random generators.
"""

import ctypes
import json
import logging
import os
import random
import signal
import sys
import time
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from math import inf
from pathlib import Path
from threading import Timer

import torch
import torch._dynamo
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.checkpoint import latest, read_manifest
from shoal.train import environment, loop, world
from shoal.train.checkpoints import read_progress
from shoal.train.config import (
    DataConfig,
    FaultConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from shoal.train.job import TrainJob, new_job
from shoal.train.rank import run_rank
from shoal.train.run_folder import RunFolder
from shoal.train.step import training_step

NUM_RANKS = 4
STEPS_PER_KILL = 4
MEETING = timedelta(seconds=20)
SPARE_RESTARTS = 3
"""Forks of the agent, which has threads, rarely never come to life: ranks lost like others."""
SAVE_EVERY = 2
MOMENTS_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A rank that dies in a step of its start, or at a moment after it if that comes first."""

    rank: int
    step: int
    share: float
    """How much of the step it does."""
    moment_s: float = inf


def drawn(kills: int, seed: int, *, at_moments: bool) -> list[Victim]:
    choose = random.Random(seed)
    victims = []
    for _ in range(kills):
        rank, step = choose.randrange(NUM_RANKS), choose.randrange(1, STEPS_PER_KILL + 1)
        victim = Victim(rank=rank, step=step, share=choose.random())
        if at_moments:
            moment_s = choose.uniform(0, MOMENTS_S)
            victim = replace(victim, step=STEPS_PER_KILL, moment_s=moment_s)
        victims.append(victim)
    return victims


def make_job(folder: Path, kills: int) -> TrainJob:
    config = TrainConfig(
        model=ModelConfig(dim=16, layers=1, heads=2, context=16),
        data=DataConfig(max_bytes=20_000),
        parallel=ParallelConfig(device="cpu", nproc=NUM_RANKS, threads=1),
        run=RunConfig(
            steps=STEPS_PER_KILL * (kills + 1),
            batch_size=8,
            validate_every=0,
            save_every=SAVE_EVERY,
            keep_last=0,
            sample_tokens=0,
            out=folder.parent,
            name=folder.name,
        ),
        faults=FaultConfig(max_restarts=kills + SPARE_RESTARTS, stall_limit=30.0),
    )
    job = new_job(config, overwrite=False)
    job.create(num_ranks=NUM_RANKS)
    return job


def run(path: str, victims: list[Victim]) -> None:
    """Be a rank, and die if it is the next victim."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork inherits the agent's handler
    place, kills = environment.place(), num_kills(path)
    assert place is not None
    own = victims[kills] if kills < len(victims) and victims[kills].rank == place.rank else None
    if own is not None and own.moment_s < inf:
        Timer(own.moment_s, die, (path, kills)).start()
    calls = iter(range(1, 10**9))
    noise = torch.zeros(())

    def step(*arguments, **options):
        nonlocal noise
        # A run whose numbers depend on the generators of each rank, as dropout makes them.
        noise = torch.rand(()) + random.random()
        if own is not None and next(calls) == own.step:
            if own.step > SAVE_EVERY:
                wait_for_checkpoint(RunFolder(Path(path)))
            accept = options["accept"]
            early = own.share < 0.5
            options["accept"] = lambda attempt: die(path, kills) if early else accept(attempt)
            training_step(*arguments, **options)
            die(path, kills)
        return training_step(*arguments, **options)

    loop.training_step = step
    world.MEETING_TIMEOUT = MEETING
    run_rank(place, TrainJob.reopen(RunFolder(Path(path)), None), create=False, signals=[])


def wait_for_checkpoint(folder: RunFolder) -> None:
    """Die only when a save that was begun is whole, so that there is something to go on from."""
    end = time.monotonic() + 20
    while latest(folder.checkpoints) is None and time.monotonic() < end:
        time.sleep(0.01)


def num_kills(path: str) -> int:
    """How many victims of this run have died: a start that was lost otherwise had none."""
    return len([*Path(path).parent.glob(f"{Path(path).name}.kill-*")])


def die(path: str, number: int) -> bool:
    Path(f"{path}.kill-{number}").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    return False


def launch(job: TrainJob, victims: list[Victim]) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=NUM_RANKS,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=len(victims) + SPARE_RESTARTS,
        monitor_interval=0.02,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=str(job.folder.logs), redirects=Std.ALL, tee=Std.NONE),
    )
    elastic_launch(config, run)(str(job.folder.path), victims)


def losses(job: TrainJob) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in job.folder.metrics.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


def num_resumes(job: TrainJob) -> int:
    return job.folder.metrics.read_text().count('"resume"')


def saved(job: TrainJob) -> dict[str, bytes | object]:
    """Every file of tensors by its name in `checkpoints`, and every position in the data."""
    folder = job.folder.checkpoints
    found: dict[str, bytes | object] = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.glob("step-*/*.safetensors")
    }
    for path in folder.glob("step-*"):
        found[path.name] = asdict(read_progress(path))
    return found


def main() -> None:
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # kills are what this is about
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    victims = drawn(kills, seed, at_moments=sys.argv[4:] == ["moments"])
    unbroken, broken = make_job(folder / "unbroken", kills), make_job(folder / "broken", kills)
    launch(unbroken, [])
    launch(broken, victims)
    steps = unbroken.config.run.steps
    assert [step for step, _ in losses(unbroken)] == list(range(1, steps + 1))
    assert losses(broken) == losses(unbroken), victims
    expected, found = saved(unbroken), saved(broken)
    assert sorted(found) == sorted(expected)
    differing = [name for name in expected if found[name] != expected[name]]
    assert not differing, (victims, differing)
    names = read_manifest(unbroken.folder.checkpoints / f"step-{steps:08d}").tensors
    assert {name.split("/")[0] for name in names} == {"model", "optimizer", "random"}
    assert num_kills(str(broken.folder.path)) == kills
    print(f"{kills} kills, {num_resumes(broken)} resumes, {steps} steps")


if __name__ == "__main__":
    main()

"""Kills a random rank of a training run at a random step, again and again, and lets it go on.

    python losing_ranks.py FOLDER KILLS SEED

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
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.checkpoint import latest, read_manifest
from shoal.train import environment, generation, loop
from shoal.train.config import (
    DataConfig,
    FaultConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from shoal.train.folder import RunFolder
from shoal.train.job import Job, new_job
from shoal.train.rank import run_rank
from shoal.train.state import read_progress
from shoal.train.step import training_step

NUM_RANKS = 4
STEPS_PER_KILL = 4
MEETING = timedelta(seconds=20)
SPARE_RESTARTS = 3
"""Forks of the agent, which has threads, rarely never come to life: ranks lost like others."""
SAVE_EVERY = 2


def make_job(folder: Path, kills: int) -> Job:
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


def run(path: str, victims: list[tuple[int, int, float]]) -> None:
    """Be a rank, and die if this start's victim is this one: rank, step, share of the step."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork inherits the agent's handler
    place, start = environment.place(), environment.restarts().count
    assert place is not None
    calls = iter(range(1, 10**9))
    noise = torch.zeros(())

    def step(*arguments, **options):
        nonlocal noise
        # A run whose numbers depend on the generators of each rank, as dropout makes them.
        noise = torch.rand(()) + random.random()
        victim, number, share = victims[start] if start < len(victims) else (-1, 0, 0.0)
        if victim == place.rank and next(calls) == number:
            if number > SAVE_EVERY:
                wait_for_checkpoint(RunFolder(Path(path)))
            accept = options["accept"]
            options["accept"] = lambda attempt: die() if share < 0.5 else accept(attempt)
            training_step(*arguments, **options)
            die()
        return training_step(*arguments, **options)

    loop.training_step = step
    generation._TIMEOUT = MEETING
    run_rank(place, Job.reopen(RunFolder(Path(path)), None), create=False, signals=[])


def wait_for_checkpoint(folder: RunFolder) -> None:
    """Die only when a save that was begun is whole, so that there is something to go on from."""
    end = time.monotonic() + 20
    while latest(folder.checkpoints) is None and time.monotonic() < end:
        time.sleep(0.01)


def die() -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return False


def launch(job: Job, victims: list[tuple[int, int, float]]) -> None:
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


def losses(job: Job) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in job.folder.metrics.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


def num_resumes(job: Job) -> int:
    return job.folder.metrics.read_text().count('"resume"')


def saved(job: Job) -> dict[str, bytes | object]:
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
    choose = random.Random(seed)
    victims = [
        (choose.randrange(NUM_RANKS), choose.randrange(1, STEPS_PER_KILL + 1), choose.random())
        for _ in range(kills)
    ]
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
    print(f"{kills} kills, {num_resumes(broken)} resumes, {steps} steps")


if __name__ == "__main__":
    main()

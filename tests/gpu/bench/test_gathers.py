"""In timed steps every engine computes on numbers, and no kernel writes them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.bench.cases import CASES, Case, Mode, Run
from shoal.bench.engines import ENGINES
from shoal.bench.figures import Gathers
from shoal.bench.group import join
from shoal.bench.workbench import Workbench, build_model
from shoal.bench.worker import Stage, Worker

SHAPE = replace(CASES[0].shape, dim=512, num_layers=6, num_heads=8, vocab_size=4096)
CASE = replace(CASES[0], shape=SHAPE, batch_size=2, seq_len=256)
EAGER = ("fsdp1", "fsdp2", "shoal", "shoal-flat", "shoal-wrapper")


@pytest.fixture(autouse=True)
def leave() -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    torch.cuda.empty_cache()


def spoil() -> None:
    """Leave NaNs in all memory that compute's next tensors may get."""
    spoilt = [
        torch.full((num_mib << 18,), float("nan"), device="cuda")
        for num_mib in (1, 2, 4, 8, 16, 32, 64)
        for _ in range(8)
    ]
    del spoilt


@pytest.mark.parametrize("case", [CASE, replace(CASE, name="B1-64", world_size=64)])
@pytest.mark.parametrize("engine", EAGER)
def test_memory_of_gathers_keeps_its_values(engine: str, case: Case, tmp_path: Path) -> None:
    run = Run(case=case, engine=engine, mode=Mode.EAGER, device_type="cuda")
    group = join(run, 0, tmp_path / "store")
    assert group is not None
    model = ENGINES[engine].wrap(build_model(run), run)
    workbench = Workbench(run, model)
    workbench.warm_up(2)
    group.keep_gathers()
    ENGINES[engine].gather_apart(model)
    workbench.warm_up(3)
    for _ in range(3):
        spoil()
        workbench.warm_up(2)
        spoil()
        workbench.inspect(group)
    assert group.keeps_all_gathers
    workbench.rest()
    group.keep_gathers()
    spoil()
    workbench.warm_up(2)
    workbench.inspect(group)


@pytest.mark.parametrize("engine", [*EAGER, "ddp", "plain"])
def test_a_worker_keeps_gathers_while_it_times(engine: str, tmp_path: Path) -> None:
    run = Run(case=CASE, engine=engine, mode=Mode.EAGER, device_type="cuda")
    worker = Worker(run, 0, tmp_path, rests=True)
    built = worker.answer(Stage.BUILD)
    assert getattr(built, "gathers", "?") == (None if engine == "plain" else Gathers.KEPT)
    for stage in (Stage.COMPUTE, Stage.OPTIMIZE):
        worker.answer(stage)

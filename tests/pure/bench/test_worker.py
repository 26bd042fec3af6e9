"""A worker refuses to measure an engine on a network that delivers something else than numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.bench.cases import CASES, Mode, Pace, Run
from shoal.bench.figures import Built, Gathers
from shoal.bench.model import ValuesError
from shoal.bench.worker import Stage, Worker
from shoal.comm.calls import Call, Slots
from shoal.comm.collectives import Kind
from shoal.comm.imagined_ranks import receive

PACE = Pace(warmup=1, steps=2, rounds=1, optimizer_steps=2)
CASE = replace(CASES[0].quickly(), mixed_precision=False, pace=PACE)
ENGINES = ("fsdp2", "shoal", "shoal-flat", "shoal-wrapper")
GATHERS_IN_FORWARD, GATHERS_IN_STEP = 5, 9


@pytest.fixture(autouse=True)
def leave() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    if dist.is_initialized():
        dist.destroy_process_group()


def make_worker(engine: str, folder: Path) -> Worker:
    run = Run(case=CASE, engine=engine, mode=Mode.EAGER, device_type="cpu")
    return Worker(run, 0, folder)


@pytest.mark.parametrize("engine", ENGINES)
def test_clones_send_numbers(engine: str, tmp_path: Path) -> None:
    worker = make_worker(engine, tmp_path)
    built = worker.answer(Stage.BUILD)
    assert isinstance(built, Built)
    assert built.gathers is Gathers.WRITTEN
    assert built.collectives is not None
    worker.answer(Stage.COMPUTE)
    worker.answer(Stage.OPTIMIZE)


@pytest.mark.parametrize("value", [float("nan"), 0.0])
@pytest.mark.parametrize("only_backward", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_of_something_else_are_refused(
    engine: str,
    only_backward: bool,
    value: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gathered = 0

    def this_piece_only(call: Call, rank: int, size: int) -> None:
        nonlocal gathered
        receive(call, rank, size)
        if call.kind is Kind.ALL_GATHER and isinstance(call.output, Slots):
            is_backward = gathered % GATHERS_IN_STEP >= GATHERS_IN_FORWARD
            gathered += 1
            if call.output.flat is not None and is_backward >= only_backward:
                call.output.flat[call.output.flat.numel() // size :] = value

    monkeypatch.setattr("shoal.comm.modelled.receive", this_piece_only)
    with pytest.raises(ValuesError):
        make_worker(engine, tmp_path).answer(Stage.BUILD)

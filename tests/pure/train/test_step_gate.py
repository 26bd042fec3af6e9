"""What is not finite is named, with a way on; so are ranks that hold the others up."""

import math
from pathlib import Path

import pytest

from shoal.train.config import TrainConfig
from shoal.train.job import TrainJob
from shoal.train.run_folder import RunFolder
from shoal.train.step_gate import RankReport, Stragglers, divergence_advice, nonfinite

JOB = TrainJob(config=TrainConfig(), folder=RunFolder(Path("runs/x")), checkpoint=None)


@pytest.mark.parametrize(
    ("losses", "norm", "expected"),
    [
        ([1.0, 2.0], 3.0, ""),
        ([1.0, math.nan], math.nan, "step 5: the loss of rank 1 is not finite"),
        ([math.inf, math.nan], 1.0, "step 5: the loss of ranks 0, 1 is not finite"),
        ([1.0, 2.0], math.inf, "step 5: the norm of the gradients is inf, not finite"),
    ],
)
def test_what_is_not_finite_is_named(losses, norm, expected):
    reports = [
        RankReport(loss=loss, own_ms=1, memory_bytes=1, stop=False, save_status=0, collectives=0)
        for loss in losses
    ]
    assert nonfinite(5, reports, norm) == expected


def test_the_way_on_starts_from_the_last_checkpoint():
    text = divergence_advice("step 5: …", JOB, Path("runs/x/checkpoints/step-00000004"))
    assert "Go on from step 4 with: shoal train --resume runs/x --lr 0.001" in text
    assert "--name x --overwrite --lr 0.001" in divergence_advice("step 5: …", JOB, None)


def reports(*own_ms: float) -> list[RankReport]:
    return [
        RankReport(loss=1, own_ms=ms, memory_bytes=1, stop=False, save_status=0, collectives=0)
        for ms in own_ms
    ]


def test_a_rank_that_is_slow_for_a_while_is_named_once():
    stragglers = Stragglers()
    notes = [note for step in range(1, 21) for note in stragglers.notes(step, reports(50, 51, 99))]
    assert notes == [
        f"step {step}: rank 2 holds the others up: 99 ms of its own per step, where 51 ms are usual"
        for step in (10, 20)
    ]


def test_a_single_slow_step_and_noise_are_not_told():
    stragglers = Stragglers()
    for step in range(1, 31):
        slow = 500 if step == 7 else 50
        assert stragglers.notes(step, reports(50, slow, 52)) == []
    for step in range(31, 51):
        assert stragglers.notes(step, reports(1, 4, 1)) == []

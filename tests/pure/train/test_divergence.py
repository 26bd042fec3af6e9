"""What is not finite is named, with a way on."""

import math
from pathlib import Path

import pytest

from shoal.train.config import TrainConfig
from shoal.train.divergence import advice_after, nonfinite
from shoal.train.folder import RunFolder
from shoal.train.job import Job
from shoal.train.told import Told, Word

JOB = Job(config=TrainConfig(), folder=RunFolder(Path("runs/x")), checkpoint=None)


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
    words = [
        Word(loss=loss, own_ms=1, memory_bytes=1, stop=False, save_status=0, collectives=0)
        for loss in losses
    ]
    assert nonfinite(5, Told(tuple(words)), norm) == expected


def test_the_way_on_starts_from_the_last_checkpoint():
    text = advice_after("step 5: …", JOB, Path("runs/x/checkpoints/step-00000004"))
    assert "Go on from step 4 with: shoal train --resume runs/x --lr 0.001" in text
    assert "--name x --overwrite --lr 0.001" in advice_after("step 5: …", JOB, None)

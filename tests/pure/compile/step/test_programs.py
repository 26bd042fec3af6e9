"""Random programs around `compile_step`: whatever a user changes, it trains as the written step."""

from __future__ import annotations

import pytest
import torch

from step_programs import CHANGES, OPTIMIZERS, UNSHARDED, Model, run_program


def build() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_program_trains_as_written(kind: str) -> None:
    run_program(len(kind), kind, build, [*CHANGES, *UNSHARDED])


@pytest.mark.soak
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("first", range(0, 30, 10))
def test_many_programs_train_as_written(kind: str, first: int) -> None:
    for seed in range(first, first + 10):
        run_program(seed, kind, build, [*CHANGES, *UNSHARDED])

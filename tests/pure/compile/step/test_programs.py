"""Random programs around `compile_step`: whatever a user changes, it trains as the written step."""

from __future__ import annotations

import pytest
import torch

from step_programs import CHANGES, OPTIMIZERS, UNSHARDED, Model, _load, run_program


def build() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_program_trains_as_written(kind: str) -> None:
    for seed in range(2):
        run_program(seed, kind, build, [*CHANGES, *UNSHARDED, _load])

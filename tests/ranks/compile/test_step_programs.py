"""Random programs around `compile_step` on ranks: sharded in every layout, and replicated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import ranks
from shoal import fully_shard, replicate
from shoal.layout import Block, Even, Flat, Rows, Whole
from step_programs import CHANGES, OPTIMIZERS, Model, run_program

LAYOUTS: dict[str, Any] = {
    **{"even": Even(), "flat": Flat(), "rows": Rows(), "block": Block(3), "whole": Whole()},
    "replicate": None,
}


def build(where: str) -> Any:
    torch.manual_seed(0)
    model = Model()
    if where == "replicate":
        return replicate(model, find_unused_parameters=True)
    for block in model.blocks:
        fully_shard(block, layout=LAYOUTS[where])
    return fully_shard(model, layout=LAYOUTS[where])


@ranks(2, timeout_s=240)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_program_trains_as_written(where: str, kind: str) -> None:
    run_program(len(where) * len(kind), kind, lambda: build(where), CHANGES)


@pytest.mark.soak
@ranks(2, 4, timeout_s=900)
@pytest.mark.parametrize("where", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_many_programs_train_as_written(where: str, kind: str) -> None:
    for seed in range(5):
        run_program(seed, kind, lambda: build(where), CHANGES)

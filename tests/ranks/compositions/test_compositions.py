"""Features in every way to shard, beside the unsharded model: the cells of `docs/compose.md`."""

from __future__ import annotations

from pathlib import Path

import pytest

from compositions import optimizers, parameters, training
from compositions.cells import claimed, try_column


@pytest.mark.compose("mixed precision", "everywhere")
@pytest.mark.compose("gradient accumulation", "everywhere")
@pytest.mark.compose("activation checkpointing", "everywhere")
@pytest.mark.compose("autocast", "everywhere")
@pytest.mark.compose("frozen parameters", "everywhere")
@pytest.mark.compose("unused parameters", "everywhere")
@pytest.mark.compose("meta-device initialisation", "everywhere")
@pytest.mark.compose("full parameters", "everywhere")
@pytest.mark.compose("clipping by norm", "everywhere")
@pytest.mark.compose("gradient scaling", "everywhere")
@pytest.mark.compose("communication hooks", "everywhere")
@pytest.mark.compose("gradient penalties", "everywhere")
@pytest.mark.compose("torch.func", "everywhere")
@pytest.mark.compose("reshard_after_forward as a number", "everywhere")
@pytest.mark.compose("uneven inputs", "everywhere")
def test_training(column: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """What a step does besides a forward and a backward."""
    try_column(column, claimed(request, column), training.ROWS, tmp_path)


@pytest.mark.compose("tied parameters in one unit", "everywhere")
@pytest.mark.compose("tied parameters across units", "everywhere")
@pytest.mark.compose("non-contiguous parameters", "everywhere")
@pytest.mark.compose("complex parameters", "everywhere")
@pytest.mark.compose("uneven shards along any dim", "everywhere")
@pytest.mark.compose("0-d parameters", "everywhere")
@pytest.mark.compose("sparse gradients", "everywhere")
@pytest.mark.compose("several dtypes in one unit", "everywhere")
@pytest.mark.compose("tensors with gather hooks", "everywhere")
def test_parameters(column: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Parameters of odd kinds."""
    try_column(column, claimed(request, column), parameters.ROWS, tmp_path)


@pytest.mark.compose("Adam and AdamW", "everywhere")
@pytest.mark.compose("SGD, fused too", "everywhere")
@pytest.mark.compose("other element-wise optimizers", "everywhere")
@pytest.mark.compose("Adafactor", "everywhere")
@pytest.mark.compose("LBFGS", "everywhere")
@pytest.mark.compose("Muon", "everywhere")
def test_optimizers(column: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Optimizers, ours where torch's look across elements."""
    try_column(column, claimed(request, column), optimizers.ROWS, tmp_path)

"""Features in every way to shard, beside the unsharded model: the cells of `docs/compose.md`."""

from __future__ import annotations

from pathlib import Path

import pytest

from compositions import optimizers, parameters, training
from compositions.cells import claimed, refused, try_column
from harness import on_ranks

pytestmark = pytest.mark.timeout(600)
ROWS = training.ROWS | parameters.ROWS | optimizers.ROWS


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
@pytest.mark.compose("gradient penalties", "fully_shard", "wrapper", "replicate", "every layout")
@pytest.mark.compose("gradient penalties", "every mesh", "offload")
@pytest.mark.compose("torch.func", "everywhere")
@pytest.mark.compose("reshard_after_forward as a number", "everywhere")
@pytest.mark.compose("uneven inputs", "fully_shard", "wrapper", "replicate", "every layout")
@pytest.mark.compose("uneven inputs", "HSDP", "offload", "checkpoint")
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
@pytest.mark.compose(
    "tensors with gather hooks",
    "fully_shard",
    "every layout",
    "every mesh",
    "offload",
    "checkpoint",
)
@pytest.mark.compose(
    "DTensor parameters",
    "fully_shard",
    "wrapper",
    "replicate",
    "every layout",
    "every mesh",
    "offload",
    "checkpoint",
)
@pytest.mark.compose(
    "experts",
    "fully_shard",
    "wrapper",
    "replicate",
    "every layout",
    "every mesh",
    "offload",
    "checkpoint",
)
def test_parameters(column: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Parameters of odd kinds."""
    try_column(column, claimed(request, column), parameters.ROWS, tmp_path)


@pytest.mark.compose("Adam and AdamW", "everywhere")
@pytest.mark.compose("SGD, fused too", "everywhere")
@pytest.mark.compose("other element-wise optimizers", "everywhere")
@pytest.mark.compose("Adafactor", "everywhere")
@pytest.mark.compose("LBFGS", "every door", "every layout", "every mesh", "offload")
@pytest.mark.compose(
    "Muon", "fully_shard", "replicate", "compiled", "every layout", "every mesh", "offload"
)
def test_optimizers(column: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Optimizers, ours where torch's look across elements."""
    try_column(column, claimed(request, column), optimizers.ROWS, tmp_path)


REFUSALS = {
    ("gradient penalties", "compiled"): "does not currently support double backward",
    ("uneven inputs", "compiled"): r"shoal\.join: ",
    ("uneven inputs", "TP"): r"shoal\.join: the collective 'allreduce'",
    ("uneven inputs", "EP"): r"shoal\.join: the collective 'alltoall",
    ("uneven inputs", "PP"): r"shoal\.join: ",
    ("tensors with gather hooks", "compiled"): "with parameters with all-gather hooks",
    ("DTensor parameters", "compiled"): "with DTensor parameters",
    ("experts", "compiled"): "with DTensor parameters",
    ("LBFGS", "checkpoint"): "checkpoints of such optimizer state are not supported",
}
"""What the error says."""


@pytest.mark.compose("gradient penalties", "compiled", refused="its backward has no derivative")
@pytest.mark.compose("uneven inputs", "compiled", refused="a graph tells nobody of its moments")
@pytest.mark.compose(
    "uneven inputs", "TP", "EP", "PP", refused="ranks without inputs join no other collectives"
)
@pytest.mark.compose(
    "tensors with gather hooks", "compiled", refused="a graph reads one leaf of a unit"
)
@pytest.mark.compose("DTensor parameters", "compiled", refused="graphs have plain parameters")
@pytest.mark.compose("experts", "compiled", refused="graphs have plain parameters")
@pytest.mark.compose("LBFGS", "checkpoint", refused="its states are lists of vectors")
@pytest.mark.parametrize(("cell", "words"), REFUSALS.items(), ids=str)
def test_refusals(
    cell: tuple[str, str], words: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """What cannot work says so."""
    name, column = cell
    assert name in claimed(request, column)
    feature = ROWS[name][0]
    on_ranks(feature.world_of(column), refused, column, feature, words, tmp_path)

"""What TensorBoard is told; TensorBoard itself need not be installed."""

import sys
from types import ModuleType

from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.train.tensorboard import TensorBoard


def test_every_number_becomes_a_scalar(tmp_path, monkeypatch):
    scalars: dict[tuple[str, int], float] = {}

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            scalars[name, step] = value

        def close(self) -> None:
            scalars["closed", 0] = 1

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = TensorBoard(tmp_path)
    board.on_step(StepRecord(step=3, loss=2.0, lr=0.1, memory_bytes=(5, 6)), ())
    board.on_validation(ValidationRecord(step=3, loss=2.5))
    board.close()
    assert scalars["train/loss", 3] == 2.0
    assert scalars["train/lr", 3] == 0.1
    assert scalars["memory/rank_1", 3] == 6
    assert scalars["validation/loss", 3] == 2.5
    assert scalars["closed", 0] == 1

"""A run's numbers in the loggers of others, which stand-ins take the place of."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from shoal.errors import UsageError
from shoal.report.metrics import StepRecord, ValidationRecord
from shoal.train.config import RunConfig, TrainConfig
from shoal.train.job import new_job
from shoal.train.observe.loggers import WeightsAndBiases


def test_weights_and_biases_hear_of_every_step(tmp_path, monkeypatch):
    heard, given = [], {}

    def init(**options):
        given.update(options)
        log = lambda values, step: heard.append((step, values))  # noqa: E731
        return SimpleNamespace(log=log, finish=lambda: heard.append("end"))

    module = ModuleType("wandb")
    module.init = init  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "wandb", module)
    (tmp_path / "run").mkdir()
    logger = WeightsAndBiases(tmp_path / "run" / "wandb", {"run": {"steps": 9}})
    logger.on_step(StepRecord(step=3, loss=2.0, lr=0.1, memory_bytes=(5, 6)), ())
    logger.on_validation(ValidationRecord(step=3, loss=2.5))
    logger.close()
    assert given["name"] == "run"
    assert given["config"] == {"run": {"steps": 9}}
    assert (tmp_path / "run" / "wandb").is_dir()
    numbers = {"train/loss": 2.0, "train/lr": 0.1, "memory/rank_0": 5, "memory/rank_1": 6}
    assert heard == [(3, numbers), (3, {"validation/loss": 2.5}), "end"]


@pytest.mark.parametrize(("flag", "package"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_logger_that_is_not_installed_is_named(tmp_path, monkeypatch, flag, package):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = RunConfig(out=tmp_path, name="run", **{flag: True})
    with pytest.raises(UsageError, match=f"--{flag}: {package} is not installed; try: pip install"):
        new_job(TrainConfig(run=run), overwrite=False)
    assert not (tmp_path / "run").exists()

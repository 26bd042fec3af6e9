"""Configs in TOML: written with `--print-config`, read with `--config`."""

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.config_file import read_config_file, write_config
from shoal.cli.main import main
from shoal.errors import UsageError
from shoal.train.config import DataConfig, OptimConfig, RunConfig, TrainConfig
from shoal.train.options import options_of, to_json


def read(folder: Path, text: str) -> TrainConfig:
    file = folder / "run.toml"
    file.write_text(text)
    return read_config_file(file)


def test_what_is_printed_is_read_back(tmp_path):
    assert read(tmp_path, write_config(TrainConfig())) == TrainConfig()


@given(
    name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1),
    lr=st.floats(1e-300, 1000),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_value_is_read_back(tmp_path_factory, name, lr, seed):
    if name in (".", ".."):
        return
    config = TrainConfig(
        optim=OptimConfig(lr=lr),
        data=DataConfig(folder=Path(name)),
        run=RunConfig(name=name, seed=seed, tensorboard=True),
    )
    assert read(tmp_path_factory.mktemp("c"), write_config(config)) == config


def test_every_option_is_explained():
    text = write_config(TrainConfig())
    for option in options_of(TrainConfig):
        assert f"{option.path[-1]} =" in text
        assert option.help in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optm]\nlr = 1", "unknown name 'optm'. Did you mean optim?"),
        ("[optim]\nwarm_up = 1", "unknown option 'warm_up' in [optim]. Did you mean warmup?"),
        ("[optim]\nsteps = 1", "unknown option 'steps' in [optim]. Did you mean [run] steps?"),
        ("lr = 1", "unknown name 'lr'. It belongs into a table: [optim] lr."),
        ("stepz = 1", "unknown name 'stepz'. Did you mean [run] steps?"),
        ("optim = 1", "optim should be a table, [optim], got 1"),
        ("[optim]\nlr = 'fast'", "--lr: expected float, got 'fast' (str)"),
        ("[optim]\nlr = -1", "--lr: expected more than 0"),
        ("[optim", "is not TOML"),
        ("[run]\nname = 1979-05-27", "--name: expected str"),
        ("[optim.lr]\nx = 1", "--lr: expected float"),
    ],
)
def test_mistakes_are_named_with_what_was_meant(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    assert message in str(caught.value)
    assert "run.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*none\.toml: No such file"):
        read_config_file(tmp_path / "none.toml")


def test_flags_win_over_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[optim]\nlr = 0.5\nwarmup = 7\n[run]\nname = 'a'\n")
    assert main(["train", "--config", "run.toml", "--lr", "0.25", "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["optim"]["lr"] == 0.25
    assert printed["optim"]["warmup"] == 7
    assert printed["run"]["name"] == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]

    Path("run.toml").write_text("[run]\nstepz = 1\n")
    assert main(["train", "--config", "run.toml"]) == 2
    assert "Did you mean steps?" in capsys.readouterr().err
    assert main(["train", "--config", "run.toml", "--recipe", "a.py"]) == 2
    assert "--config and --recipe" in capsys.readouterr().err


def test_print_config_is_quick_and_prints_defaults(capsys):
    assert main(["train", "--print-config"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    expected = json.loads(json.dumps(to_json(TrainConfig())))
    assert printed == {
        table: {name: value for name, value in values.items() if value is not None}
        for table, values in expected.items()
    }

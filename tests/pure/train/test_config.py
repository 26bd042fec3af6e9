"""Configs, recipes, and what is said of those that do not work."""

from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.train.config import DataConfig, ModelConfig, RunConfig, TrainConfig, load_recipe


def test_heads_must_divide_the_width_and_the_message_says_what_would():
    with pytest.raises(UsageError, match="Try --dim 64"):
        ModelConfig(dim=60, heads=4)


def test_the_hidden_width_follows_the_width_unless_given():
    assert ModelConfig(dim=256).feed_forward_dim == 704
    assert ModelConfig(dim=256, hidden=100).feed_forward_dim == 100


def test_validation_needs_held_out_text():
    with pytest.raises(UsageError, match="--validate-every 0"):
        TrainConfig(data=DataConfig(held_out=0))
    TrainConfig(data=DataConfig(held_out=0), run=RunConfig(validate_every=0))


def test_parts_must_be_of_their_kind():
    with pytest.raises(UsageError, match=r"TrainConfig.model: expected ModelConfig, got RunConfig"):
        TrainConfig(model=RunConfig())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b"])
def test_a_name_is_one_folder(name):
    with pytest.raises(UsageError, match="--name"):
        RunConfig(name=name)


def test_a_batch_is_shared_out_evenly_or_refused():
    config = TrainConfig(run=RunConfig(batch_size=12, accumulate=2))
    config.check_ranks(3)
    with pytest.raises(UsageError, match=r"4 x 2 = 8; got 12. Try --batch-size 16"):
        config.check_ranks(4)


GOOD = """\
from shoal.train.config import ModelConfig, TrainConfig

WIDTH = 64

def recipe():
    return TrainConfig(model=ModelConfig(dim=WIDTH))

def wide():
    return TrainConfig(model=ModelConfig(dim=2 * WIDTH))
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my_recipe.py"
    path.write_text(text)
    return str(path)


def test_a_function_returns_the_config(tmp_path):
    path = write(tmp_path, GOOD)
    assert load_recipe(path).model.dim == 64
    assert load_recipe(path + ":wide").model.dim == 128


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("1 +\n", "", r"my_recipe.py, line 1: SyntaxError: invalid syntax"),
        ("x = 1\nraise KeyError('no')\n", "", r"my_recipe.py, line 2: KeyError: 'no'"),
        ("def recipe():\n    return 1 / 0\n", "", r"line 2: ZeroDivisionError: division by zero"),
        ("def recipe():\n    exit(3)\n", "", r"line 2: SystemExit: 3"),
        ("def recipe():\n    return {}\n", "", r"line 1: recipe\(\) returned dict, expected"),
        ("recipe = 1\n", "", r"no function recipe\(\) in it; it defines no function"),
        (GOOD, ":narrow", r"no function narrow\(\) in it; it defines recipe, wide"),
        (GOOD, ":a-b", r"expected FILE:function"),
        (
            "from shoal.train.config import ModelConfig\ndef recipe():\n    ModelConfig(dim=-1)\n",
            "",
            r"my_recipe.py, line 3: --dim: expected at least 2, got -1",
        ),
    ],
)
def test_a_recipe_that_fails_is_named_with_its_line(tmp_path, text, name, message):
    with pytest.raises(UsageError, match=message):
        load_recipe(write(tmp_path, text) + name)


def test_a_file_that_is_not_there_is_named():
    with pytest.raises(UsageError, match=r"there is no file nowhere/recipe.py"):
        load_recipe("nowhere/recipe.py")


@pytest.mark.parametrize("name", ["tiny.py", "gpt.py", "gpt.py:large"])
def test_the_recipes_of_the_repository_work(name):
    recipes = Path(__file__).parents[3] / "recipes"
    assert isinstance(load_recipe(f"{recipes}/{name}"), TrainConfig)

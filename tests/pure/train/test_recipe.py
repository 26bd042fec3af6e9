"""Recipes, and what is said of those that do not work."""

from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.train.config import TrainConfig
from shoal.train.recipe import load_recipe

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

"""Recipes: Python files with a function that returns a complete config."""

from __future__ import annotations

import os
import runpy
import traceback
from pathlib import Path
from types import FunctionType

from shoal.errors import UsageError
from shoal.files import open_regular
from shoal.train.config import TrainConfig

DEFAULT_FUNCTION = "recipe"


def load_recipe(reference: str) -> TrainConfig:
    """Call the function that `FILE[:function]` names and return its config."""
    path, name = _parse(reference)
    function = _find(path, name)
    try:
        config = function()
    except (Exception, SystemExit) as error:
        raise UsageError(f"recipe {_where(error, path)}: {_describe(error)}") from error
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"recipe {path}, line {function.__code__.co_firstlineno}: {name}() returned "
            f"{type(config).__name__}, expected shoal.train.config.TrainConfig"
        )
    return config


def _parse(reference: str) -> tuple[Path, str]:
    file, colon, name = reference.rpartition(":")
    path, name = (Path(file), name) if colon else (Path(reference), DEFAULT_FUNCTION)
    if not os.path.exists(path):
        raise UsageError(f"--recipe: there is no file {path}")
    try:
        open_regular(path, follow=True).close()
    except OSError as error:
        raise UsageError(f"--recipe: cannot read {path}: {error.strerror}") from None
    if not name.isidentifier():
        raise UsageError(f"--recipe: expected FILE:function, got {reference!r}")
    return path, name


def _find(path: Path, name: str) -> FunctionType:
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:
        raise UsageError(f"recipe {_where(error, path)}: {_describe(error)}") from error
    function = names.get(name)
    if not isinstance(function, FunctionType):
        own = [
            other
            for other, value in names.items()
            if isinstance(value, FunctionType) and value.__code__.co_filename == str(path)
        ]
        known = f"it defines {', '.join(own)}" if own else "it defines no function"
        raise UsageError(
            f"recipe {path}: there is no function {name}() in it; {known}. "
            f"Name one with --recipe {path}:function."
        )
    return function


def _where(error: BaseException, path: Path) -> str:
    """Name the last line of the recipe that was running, or the one that is not Python."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def _describe(error: BaseException) -> str:
    if isinstance(error, UsageError):
        return str(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}"

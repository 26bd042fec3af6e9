"""A run's config as TOML: `--config FILE` reads it, `--print-config` writes it.

A table for each part of the config, a key for each option, by the names of the fields:

    [optim]
    lr = 0.0003
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from shoal.cli.suggest import did_you_mean
from shoal.errors import UsageError
from shoal.files import read_regular
from shoal.train.config import TrainConfig
from shoal.train.options import Option, from_json, options_of, to_json

_MOST_BYTES = 1 << 20


def read_config_file(path: Path) -> TrainConfig:
    """Read a config; what the file does not name has its default."""
    try:
        content = tomllib.loads(read_regular(path.resolve(), _MOST_BYTES).decode())
    except OSError as error:
        raise UsageError(f"--config: cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--config: {path} is not TOML: {error}") from None
    _check_names(content, path)
    return from_json(TrainConfig, content, where=path)


def _check_names(content: dict[str, Any], path: Path) -> None:
    """Raise a `UsageError` for the first name that is none, with the one that was meant."""
    known: dict[str, list[str]] = {}
    for option in options_of(TrainConfig):
        known.setdefault(option.path[0], []).append(option.path[-1])
    for table, values in content.items():
        if table not in known:
            options = {name: f"[{part}] {name}" for part, names in known.items() for name in names}
            hint = did_you_mean(table, known) or did_you_mean(table, options, shown=options)
            if table in options:
                hint = f" It belongs into a table: {options[table]}."
            raise UsageError(
                f"{path}: unknown name {table!r}.{hint} The tables are {', '.join(known)}."
            )
        if not isinstance(values, dict):
            raise UsageError(f"{path}: {table} should be a table, [{table}], got {values!r}")
        for name in values:
            if name in known[table]:
                continue
            homes = [f"[{part}] {name}" for part, names in known.items() if name in names]
            hint = f" Did you mean {homes[0]}?" if homes else did_you_mean(name, known[table])
            raise UsageError(
                f"{path}: unknown option {name!r} in [{table}].{hint} "
                "`shoal train --print-config` lists all."
            )


def write_config(config: TrainConfig) -> str:
    """Write a config with what each option means; what is left open stands as a comment."""
    values = to_json(config)
    lines: list[str] = []
    table = ""
    for option in options_of(TrainConfig):
        if option.path[0] != table:
            table = option.path[0]
            lines += ["", f"[{table}]  # {option.group}"]
        lines.append(_line(option, values[table][option.path[-1]]))
    return "\n".join(lines[1:])


def _line(option: Option, value: object) -> str:
    name = option.path[-1]
    if value is None:
        return f"# {name} =  # {option.help}"
    choices = f" ({', '.join(option.choices)})" if option.choices else ""
    return f"{name} = {_literal(value)}  # {option.help}{choices}"


def _literal(value: object) -> str:
    """Write a value as TOML, which for these types is as JSON; floats keep their point."""
    if isinstance(value, float):
        return repr(value)
    # JSON writes DEL as it is, and TOML wants it escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

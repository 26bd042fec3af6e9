"""Flags made from a config's options, and a parser that answers mistakes with a suggestion."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shoal.cli.suggest import did_you_mean
from shoal.errors import UsageError
from shoal.train.options import Option, options_of

Parse = Callable[[str], Any]

_METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` and never guesses abbreviations."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=32, width=100
            ),
            **options,
        )

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse everything, or say what is not understood and what may have been meant."""
        arguments, unknown = self.parse_known_args(list(argv))
        if unknown:
            word = unknown[0].partition("=")[0]
            kind = "flag" if word.startswith("-") else "argument"
            raise UsageError(
                f"unknown {kind} {word}.{did_you_mean(word, self._option_string_actions)} "
                f"`{self.prog} --help` lists all."
            )
        return arguments

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing and exiting."""
        raise UsageError(message[:1].lower() + message[1:])


def add_config_flags(
    parser: Parser, config_type: type, *, parsers: Mapping[str, Parse] | None = None
) -> None:
    """Add a flag for every option of a config class; `parsers` override how a flag is read."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for found in options_of(config_type):
        if found.group not in groups:
            groups[found.group] = parser.add_argument_group(found.group)
        _add(groups[found.group], found, (parsers or {}).get(found.flag))


def given_options(
    arguments: argparse.Namespace, config_type: type
) -> dict[tuple[str, ...], object]:
    """Return the options that were given on the command line, by their path in the config."""
    values = vars(arguments)
    return {
        found.path: values[".".join(found.path)]
        for found in options_of(config_type)
        if ".".join(found.path) in values
    }


def _add(group: argparse._ArgumentGroup, found: Option, parse: Parse | None) -> None:
    text, default = found.help.replace("%", "%%"), found.default
    reading: dict[str, Any]
    if found.kind is bool:
        default = "on" if default else "off"
        reading = {"action": argparse.BooleanOptionalAction}
    elif found.choices:
        reading = {"choices": found.choices}
    else:
        reading = {"type": parse or _reader(found.kind), "metavar": _METAVARS[found.kind]}
    group.add_argument(
        *filter(None, (found.flag, found.alias)),
        dest=".".join(found.path),
        default=argparse.SUPPRESS,
        help=text if default is None else f"{text} (default: {default})",
        **reading,
    )


def _reader(kind: type) -> Parse:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            name = {int: "a whole number", float: "a number"}[kind]
            raise argparse.ArgumentTypeError(f"expected {name}, got {text!r}") from None

    return read

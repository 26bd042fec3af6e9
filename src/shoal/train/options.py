"""Options: the flat view of a nested config that flags, JSON files and error messages share.

A config is a frozen dataclass whose fields are either options or further configs:

    lr: float = option(3e-3, "peak learning rate", above=0)

Every option has a flag, `--lr` here, which is how messages name it too: who set it in a recipe
finds the field by the same name. A class's `TITLE` heads its options in `--help`, and its
`__post_init__` calls `check_options`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from types import UnionType
from typing import (
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

from shoal.errors import UsageError

ConfigT = TypeVar("ConfigT")

_LARGEST_INT = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One leaf of a nested config."""

    path: tuple[str, ...]
    flag: str
    kind: type
    optional: bool
    choices: tuple[str, ...]
    default: Any
    help: str
    group: str
    alias: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def check(self, value: object) -> None:
        """Raise a `UsageError` if `value` may not stand here."""
        if value is None and self.optional:
            return
        if not self._has_kind(value):
            raise UsageError(
                f"{self.flag}: expected {self.kind.__name__}, "
                f"got {short(value)} ({type(value).__name__})"
            )
        if self.choices and value not in self.choices:
            raise UsageError(
                f"{self.flag}: expected one of {', '.join(self.choices)}; got {short(value)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{self.flag}: expected a finite number, got {value}")
        for word, bound, holds in (
            ("at least", self.at_least, lambda bound: value >= bound),
            ("more than", self.above, lambda bound: value > bound),
            ("at most", self.at_most, lambda bound: value <= bound),
        ):
            if bound is not None and not holds(bound):
                raise UsageError(f"{self.flag}: expected {word} {bound}, got {short(value)}")
        if isinstance(value, int) and abs(value) > _LARGEST_INT:
            raise UsageError(f"{self.flag}: expected at most {_LARGEST_INT}, got {short(value)}")

    def _has_kind(self, value: object) -> bool:
        if isinstance(value, bool):  # which is an int to Python
            return self.kind is bool
        return isinstance(value, int | float if self.kind is float else self.kind)


class Declared(TypedDict, total=False):
    """What `option` takes beside a default and a help text."""

    flag: str
    """Unless given, the field's name."""
    alias: str
    """A second flag for the same option."""
    at_least: float
    above: float
    at_most: float


def option(default: Any, help: str, **declared: Unpack[Declared]) -> Any:
    """Declare a dataclass field as an option."""
    return dataclasses.field(default=default, metadata={"help": help, **declared})


def options_of(config_type: type) -> list[Option]:
    """List every option of a config class, those of nested configs included, in order."""
    hints = get_type_hints(config_type)
    found: list[Option] = []
    for field in dataclasses.fields(config_type):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found += [
                dataclasses.replace(inner, path=(field.name, *inner.path))
                for inner in options_of(hint)  # pyright: ignore[reportArgumentType]
            ]
        else:
            found.append(_option_of(config_type, field, hint))
    return found


def check_options(config: object) -> None:
    """Check the types and bounds of a config's own options; call it from `__post_init__`."""
    for found in options_of(type(config)):
        if len(found.path) == 1:
            found.check(getattr(config, found.path[0]))


def replace_options(config: ConfigT, changes: Mapping[tuple[str, ...], object]) -> ConfigT:
    """Return `config` with the options at these paths changed; everything is checked again."""
    direct = {path[0]: value for path, value in changes.items() if len(path) == 1}
    nested: dict[str, dict[tuple[str, ...], object]] = {}
    for path, value in changes.items():
        if len(path) > 1:
            nested.setdefault(path[0], {})[path[1:]] = value
    for name, inner in nested.items():
        direct[name] = replace_options(getattr(config, name), inner)
    return dataclasses.replace(config, **direct)  # pyright: ignore[reportArgumentType]


def to_json(config: object) -> dict[str, Any]:
    """Return a config as nested dictionaries of what JSON can hold."""

    def table(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in fields}

    return dataclasses.asdict(config, dict_factory=table)  # pyright: ignore[reportCallIssue, reportArgumentType]


def from_json(config_type: type[ConfigT], tree: object, *, where: Path) -> ConfigT:
    """Build a config from `to_json`'s dictionaries; `where` names the file in messages."""
    if not isinstance(tree, dict):
        raise UsageError(f"{where}: expected a JSON object, got {type(tree).__name__}")
    known = {found.path: found for found in options_of(config_type)}
    sections = {path[:depth] for path in known for depth in range(len(path))}
    changes: dict[tuple[str, ...], object] = {}
    for path, value in _leaves(tree, (), deepest=max(map(len, known))):
        if path in sections and value == {}:
            continue
        if path not in known:
            raise UsageError(
                f"{where}: unknown option {short('.'.join(path))}; it was written by another "
                f"version of shoal, or edited by hand. Remove it to go on."
            )
        is_path = known[path].kind is Path and isinstance(value, str)
        changes[path] = Path(value) if is_path else value
    try:
        return replace_options(config_type(), changes)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _leaves(
    tree: Any, path: tuple[str, ...], *, deepest: int
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each path and what stands there, down to where options can stand; also empty tables."""
    if isinstance(tree, dict) and tree and len(path) < deepest:
        for name, inner in tree.items():
            yield from _leaves(inner, (*path, name), deepest=deepest)
    else:
        yield path, tree


def _option_of(config_type: type, field: dataclasses.Field[Any], hint: Any) -> Option:
    kind, choices = hint, ()
    optional = get_origin(hint) in (Union, UnionType)
    if optional:
        (kind,) = (inner for inner in get_args(hint) if inner is not type(None))
    if get_origin(kind) is Literal:
        kind, choices = str, get_args(kind)
    declared = {
        "flag": "--" + field.name.replace("_", "-"),
        "group": getattr(config_type, "TITLE", ""),
        **field.metadata,
    }
    return Option(
        path=(field.name,),
        kind=kind,
        optional=optional,
        choices=choices,
        default=field.default,
        **declared,
    )

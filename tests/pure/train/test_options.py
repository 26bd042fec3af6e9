"""Options: the flat view of a nested config."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from shoal.errors import UsageError
from shoal.train.options import (
    check_options,
    from_json,
    option,
    options_of,
    replace_options,
    to_json,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    TITLE: ClassVar[str] = "inside"

    number: int = option(3, "a number", at_least=1, at_most=9)
    rate: float = option(0.5, "a rate", above=0)
    color: Literal["red", "blue"] = option("red", "a color")
    place: Path | None = option(None, "a place", flag="--where")  # noqa: RUF009

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    TITLE: ClassVar[str] = "outside"

    inner: Inner = field(default_factory=Inner)
    loud: bool = option(False, "noise")

    def __post_init__(self) -> None:
        check_options(self)


def test_options_are_listed_with_their_flags_and_groups():
    found = {option.path: option for option in options_of(Outer)}
    assert [".".join(path) for path in found] == [
        "inner.number",
        "inner.rate",
        "inner.color",
        "inner.place",
        "loud",
    ]
    place = found["inner", "place"]
    assert (place.flag, place.kind, place.optional, place.group) == (
        "--where",
        Path,
        True,
        "inside",
    )
    assert found["inner", "color"].choices == ("red", "blue")
    assert found["loud",].kind is bool


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"number": 0}, "--number: expected at least 1, got 0"),
        ({"number": 10}, "--number: expected at most 9, got 10"),
        ({"number": "3"}, r"--number: expected int, got '3' \(str\)"),
        ({"number": True}, "--number: expected int"),
        ({"rate": 0}, "--rate: expected more than 0, got 0"),
        ({"rate": float("nan")}, "--rate: expected a finite number, got nan"),
        ({"color": "green"}, "--color: expected one of red, blue; got 'green'"),
        ({"place": "x"}, "--where: expected Path, got 'x'"),
    ],
)
def test_a_wrong_value_is_named_by_its_flag(values, message):
    with pytest.raises(UsageError, match=message):
        Inner(**values)


def test_whole_numbers_are_rates_too():
    assert Inner(rate=2).rate == 2


def test_replacing_checks_again_and_leaves_the_original():
    config = Outer()
    changed = replace_options(config, {("inner", "number"): 7, ("loud",): True})
    assert (changed.inner.number, changed.loud, config.inner.number) == (7, True, 3)
    with pytest.raises(UsageError, match="--number"):
        replace_options(config, {("inner", "number"): 70})


def test_json_round_trip():
    config = Outer(inner=Inner(place=Path("a/b"), color="blue"), loud=True)
    tree = to_json(config)
    assert tree["inner"]["place"] == "a/b"
    assert from_json(Outer, tree, where=Path("config.json")) == config


def test_a_section_may_be_empty():
    assert from_json(Outer, {"inner": {}}, where=Path("config.json")) == Outer()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"inner": {"nmber": 4}}, "config.json: unknown option 'inner.nmber'"),
        ({"inner": 4}, "config.json: unknown option 'inner'"),
        ({"outer": {}}, "config.json: unknown option 'outer'"),
        ({"outer": {"inner": {}}}, "config.json: unknown option 'outer.inner'"),
        ({"inner": {"number": {}}}, "config.json: .*--number: expected int"),
        ([1], "config.json: expected a JSON object, got list"),
        ({"inner": {"number": "4"}}, "--number: expected int"),
    ],
)
def test_a_wrong_file_is_named(tree, message):
    with pytest.raises(UsageError, match=message):
        from_json(Outer, tree, where=Path("config.json"))

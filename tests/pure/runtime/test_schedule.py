"""Orders that are learnt, and what a step does by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.layout.strategies import profile
from shoal.runtime.schedule import Action, ActionKind, Orders, derive


def forward(orders: Orders[str], units: Sequence[str]) -> list[str | None]:
    """Run a forward; returns what was predicted after each unit."""
    orders.begin()
    predicted = [orders.enter(unit) for unit in units]
    orders.end()
    return predicted


def test_the_declared_order_is_a_hint_until_a_forward_has_run() -> None:
    orders = Orders(("root", "a", "b", "c"))
    assert forward(orders, ("root", "b", "a")) == ["a", "c", "b"]
    assert orders.variants == (("root", "b", "a"),)
    assert forward(orders, ("root", "b", "a")) == ["b", "a", None]
    assert (orders.last, orders.before("a"), orders.before("b")) == ("a", "b", "root")
    assert orders.before("root") is None
    assert orders.before("c") is None


def test_orders_that_take_turns_are_both_remembered() -> None:
    orders = Orders(("root", "a", "b", "c"))
    forward(orders, ("root", "a", "b", "c"))
    forward(orders, ("root", "b", "c"))
    # At the fork the newest is assumed; from there on the right one is known.
    assert forward(orders, ("root", "a", "b", "c")) == ["b", "b", "c", None]
    assert forward(orders, ("root", "b", "c")) == ["a", "c", None]
    assert set(orders.variants) == {("root", "a", "b", "c"), ("root", "b", "c")}


def test_a_unit_may_run_several_times() -> None:
    orders = Orders(("root", "a", "b"))
    forward(orders, ("root", "a", "b", "a"))
    assert forward(orders, ("root", "a", "b", "a")) == ["a", "b", "a", None]
    assert orders.before("b") == "a"


def test_few_orders_are_kept() -> None:
    orders = Orders(tuple("abcdefghijkl"))
    for unit in "abcdefghijkl":
        forward(orders, (unit,))
    assert len(orders.variants) == 8
    assert orders.variants[0] == ("l",)


def test_a_forward_that_ran_nothing_says_nothing() -> None:
    orders = Orders(("root", "a"))
    forward(orders, ())
    assert orders.variants == (("root", "a"),)


def test_a_step_of_two_blocks() -> None:
    kinds = [
        (str(a.kind), a.unit) for a in derive(("root", "a", "b"), roots={"root"}, kept={"root"})
    ]
    assert kinds == [
        ("gather", "root"),
        ("wait", "root"),
        ("gather", "a"),
        ("forward", "root"),
        ("wait", "a"),
        ("gather", "b"),
        ("forward", "a"),
        ("free", "a"),
        ("wait", "b"),
        ("forward", "b"),
        ("free", "b"),
        ("gather", "b"),
        ("backward", "root"),
        ("wait", "b"),
        ("gather", "a"),
        ("backward", "b"),
        ("free", "b"),
        ("reduce", "b"),
        ("wait", "a"),
        ("backward", "a"),
        ("free", "a"),
        ("finish", "b"),
        ("reduce", "a"),
        ("free", "root"),
        ("finish", "a"),
        ("reduce", "root"),
        ("finish", "root"),
    ]


@profile(200)
@given(
    order=st.lists(st.sampled_from("abcdef"), max_size=9),
    kept=st.sets(st.sampled_from("rabcdef")),
    frozen=st.sets(st.sampled_from("abcdef")),
    limit=st.integers(1, 3),
)
def test_every_schedule_is_sound(
    order: list[str], kept: set[str], frozen: set[str], limit: int
) -> None:
    actions = derive(["r", *order], roots={"r"}, kept=kept, frozen=frozen, max_reductions=limit)
    full: set[str] = set()
    coming: set[str] = set()
    reducing: list[str] = []
    done: list[str] = []
    for action in actions:
        unit = action.unit
        match action.kind:
            case ActionKind.GATHER:
                assert unit not in full | coming
                coming.add(unit)
            case ActionKind.WAIT:
                coming.remove(unit)
                full.add(unit)
            case ActionKind.FORWARD | ActionKind.BACKWARD:
                assert unit in full
            case ActionKind.FREE:
                full.remove(unit)
            case ActionKind.REDUCE:
                assert unit not in frozen
                reducing.append(unit)
                done.append(unit)
                assert len(reducing) <= limit
            case ActionKind.FINISH:
                assert reducing.pop(0) == unit
    assert not full | coming
    assert not reducing
    assert sorted(done) == sorted({"r", *order} - frozen)
    assert [a.unit for a in actions if a.kind is ActionKind.FORWARD] == ["r", *order]


def test_an_action_is_a_value() -> None:
    assert Action(ActionKind.FREE, "a") == Action(ActionKind.FREE, "a")
    with pytest.raises(AttributeError):
        Action(ActionKind.FREE, "a").unit = "b"  # pyright: ignore[reportAttributeAccessIssue]

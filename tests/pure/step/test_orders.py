"""Orders that are learnt."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.step.orders import Orders


def forward(orders: Orders[str], units: Sequence[str], depth: int = 1) -> list[str]:
    """Run a forward; returns what was predicted after each unit."""
    orders.begin()
    predicted = ["".join(orders.enter(unit, depth)) for unit in units]
    orders.end()
    return predicted


def test_the_declared_order_is_a_hint_until_a_forward_has_run() -> None:
    orders = Orders(("root", "a", "b", "c"))
    assert forward(orders, ("root", "b", "a")) == ["a", "c", "b"]
    assert orders.variants == (("root", "b", "a"),)
    assert forward(orders, ("root", "b", "a")) == ["b", "a", ""]
    assert (orders.last(), orders.before("a"), orders.before("b")) == (("a",), ("b",), ("root",))
    assert orders.before("root") == ()
    assert orders.before("c") == ()


def test_orders_that_take_turns_are_both_remembered() -> None:
    orders = Orders(("root", "a", "b", "c"))
    forward(orders, ("root", "a", "b", "c"))
    forward(orders, ("root", "b", "c"))
    # At the fork the newest is assumed; from there on the right one is known.
    assert forward(orders, ("root", "a", "b", "c")) == ["b", "b", "c", ""]
    assert forward(orders, ("root", "b", "c")) == ["a", "c", ""]
    assert set(orders.variants) == {("root", "a", "b", "c"), ("root", "b", "c")}


def test_a_unit_may_run_several_times() -> None:
    orders = Orders(("root", "a", "b"))
    forward(orders, ("root", "a", "b", "a"))
    assert forward(orders, ("root", "a", "b", "a")) == ["a", "b", "a", ""]
    assert orders.before("b") == ("a",)


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


def test_several_units_ahead() -> None:
    orders = Orders("rabcd")
    forward(orders, "rabcd")
    assert forward(orders, "rabcd", depth=2) == ["ab", "bc", "cd", "d", ""]
    assert (orders.before("d", 3), orders.last(2), orders.before("a", 5)) == (
        ("c", "b", "a"),
        ("d", "c"),
        ("r",),
    )

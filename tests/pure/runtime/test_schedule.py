from shoal.runtime.schedule import Order


def test_order_goes_both_ways() -> None:
    order = Order(("root", "a", "b"))
    assert [order.after(u) for u in ("root", "a", "b", "unknown")] == ["a", "b", None, None]
    assert [order.before(u) for u in ("root", "a", "b", "unknown")] == [None, "root", "a", None]


def test_a_unit_that_ran_twice_counts_where_it_ran_first() -> None:
    assert Order(("root", "a", "b", "a", "c")).units == ("root", "a", "b", "c")

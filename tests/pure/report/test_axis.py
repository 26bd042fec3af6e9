import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.report.axis import Axis, axis_over, step_axis

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


def test_labels_are_exact_decimals_of_one_precision() -> None:
    labels = [tick.label for tick in Axis(low=0.0, high=0.35).ticks(9)]
    assert labels == ["0.00", "0.05", "0.10", "0.15", "0.20", "0.25", "0.30", "0.35"]


def test_labels_read_like_numbers() -> None:
    assert [tick.label for tick in Axis(low=-1.0, high=1.0).ticks(3)] == ["−1", "0", "1"]
    assert [tick.label for tick in Axis(low=0, high=20_000).ticks(5)][-1] == "20,000"
    small = [tick.label for tick in Axis(low=0, high=3e-6).ticks(4)]
    assert small == ["0", "1e−6", "2e−6", "3e−6"]
    assert Axis(low=0, high=3e9).ticks(4)[-1].label == "3e9"
    rate = [tick.label for tick in Axis(low=0, high=2e-4).ticks(5)]
    assert rate == ["0", "5e−5", "1e−4", "1.5e−4", "2e−4"]
    close = [tick.label for tick in Axis(low=5, high=5.000002).ticks(3)]
    assert close == ["5.000000", "5.000001", "5.000002"]


@given(FINITE, FINITE, st.integers(2, 12))
def test_ticks_are_few_distinct_ordered_and_inside(low: float, high: float, most: int) -> None:
    assume(low < high and high - low > 1e-9 * max(abs(low), abs(high)))
    ticks = Axis(low=low, high=high).ticks(most)
    places = [tick.at for tick in ticks]
    assert len(ticks) <= most
    assert places == sorted(set(places))
    assert all(0 <= place <= 1 for place in places)
    assert len({tick.label for tick in ticks}) == len(ticks)


@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_steps_have_whole_ticks(first: int, length: int) -> None:
    ticks = step_axis(first, first + length).ticks(7, whole=True)
    assert ticks
    assert all("." not in tick.label for tick in ticks)


def test_one_step_has_one_tick_in_the_middle() -> None:
    ticks = step_axis(4, 4).ticks(7, whole=True)
    assert [(tick.label, tick.at) for tick in ticks] == [("4", 0.5)]


def test_decades() -> None:
    axis = axis_over([0.02, 300.0], log=True)
    assert [tick.label for tick in axis.ticks(7)] == ["0.01", "0.1", "1", "10", "100", "1,000"]
    assert axis.at(0.0) == 0.0


@given(st.lists(st.floats(-1e12, 1e12) | st.just(math.nan)), st.booleans())
def test_axis_holds_every_finite_value(values: list[float], from_zero: bool) -> None:
    axis = axis_over(values, from_zero=from_zero)
    finite = [value for value in values if math.isfinite(value)]
    assert all(axis.low <= value <= axis.high for value in finite)
    assert not (from_zero and finite) or axis.low <= 0


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.0), (2.0, 1.0), (0.0, math.inf)])
def test_an_empty_or_infinite_axis_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low < high"):
        Axis(low=low, high=high)

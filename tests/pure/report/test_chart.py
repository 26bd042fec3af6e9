import math

from hypothesis import given
from hypothesis import strategies as st

from shoal.report.chart import Point, smooth, stretches, thin
from shoal.report.page import finite_median
from shoal.report.sections import finite_mean

VALUES = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=400)


def points(values: list[float]) -> list[Point]:
    return [Point(step, value) for step, value in enumerate(values, start=1)]


@given(VALUES, st.integers(3, 60))
def test_thin_is_short_ordered_and_keeps_the_extremes(values: list[float], limit: int) -> None:
    full = points(values)
    kept = thin(full, limit)
    steps = [point.step for point in kept]
    assert len(kept) <= max(limit, 3)
    assert steps == sorted(set(steps))
    assert {point.step for point in kept} <= {point.step for point in full}
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        shown = [point.value for point in kept if math.isfinite(point.value)]
        assert (min(shown), max(shown)) == (min(finite), max(finite))


def test_thin_keeps_a_gap() -> None:
    values = [1.0] * 1000
    values[500] = math.nan
    assert any(math.isnan(point.value) for point in thin(points(values), 30))


def test_smooth_does_not_lag_behind_a_slope() -> None:
    line = points([float(step) for step in range(400)])
    assert all(
        math.isclose(smoothed.value, point.value, abs_tol=1e-9)
        for smoothed, point in zip(smooth(line), line, strict=True)
    )


def test_smooth_calms_noise() -> None:
    noise = points([(-1.0) ** step for step in range(800)])
    assert all(abs(point.value) < 0.1 for point in smooth(noise)[20:-20])


def test_smooth_keeps_gaps_and_ignores_their_values() -> None:
    values = [2.0] * 200
    values[100] = math.inf
    smoothed = [point.value for point in smooth(points(values))]
    assert math.isnan(smoothed[100])
    assert smoothed[:100] + smoothed[101:] == [2.0] * 199


@given(st.lists(st.integers()), st.integers(1, 50))
def test_stretches_are_balanced_and_lose_nothing(items: list[int], number: int) -> None:
    parts = list(stretches(items, number))
    assert [item for part in parts for item in part] == items
    lengths = {len(part) for part in parts}
    assert len(parts) == min(number, len(items))
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_averages_skip_what_is_not_finite() -> None:
    assert finite_mean([1.0, math.nan, 3.0]) == 2.0
    assert finite_median([5.0, math.nan, 1.0, 2.0, 3.0]) == 2.5
    assert math.isnan(finite_mean([math.nan]))
    assert math.isnan(finite_median([]))

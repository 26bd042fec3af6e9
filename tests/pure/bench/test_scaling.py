"""What `benchmarks/scaling.py` says of lines."""

import runpy
from pathlib import Path

import pytest

SCALING = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "scaling.py"))
JUDGE, SLOPE = SCALING["judge"], SCALING["slope_of"]
UNITS = (8, 16, 32, 64, 128, 256, 512)


def test_a_slope_comes_back() -> None:
    assert SLOPE([(x, 3 + 0.25 * x) for x in UNITS]) == pytest.approx(0.25)


def test_lines_are_linear_and_squares_are_not() -> None:
    assert (
        JUDGE("units", [(x, 1 + 0.5 * x) for x in UNITS]) == "linear: 0.5 each, at the end × 1.00"
    )
    assert JUDGE("params", [(x, x**1.5) for x in UNITS]).startswith("steeper than linear")


def test_over_ranks_a_cost_is_constant_or_grows() -> None:
    ranks = (8, 512, 16384)
    assert JUDGE("ranks", [(n, 5.0) for n in ranks]).startswith("constant: 5 at 8, 5 at 16384")
    assert JUDGE("ranks", [(n, 5.0 + n / 16384) for n in ranks]).startswith("constant")
    assert JUDGE("ranks", [(n, 5.0 + n / 5000) for n in ranks]).startswith("grows")


def test_the_unsharded_model_is_taken_off_where_both_were_measured() -> None:
    found = [
        {"axis": "ranks", "at": {"ranks": 8}, "ms": {"plain": 1.0, "fsdp2": 5.0}},
        {"axis": "ranks", "at": {"ranks": 16384}, "ms": {"plain": 1.0}},
        {"axis": "units", "at": {"units": 8}, "ms": {"plain": 1.0, "fsdp2": 9.0}},
    ]
    assert SCALING["sharding_of"](found, "ranks", "fsdp2") == [(8, 4.0)]

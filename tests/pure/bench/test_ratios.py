from dataclasses import replace

import pytest

from pure.bench.samples import make_built, make_record, make_results
from shoal.bench.figures import ComputeRound, summarise
from shoal.bench.ratios import Ratio, ratio_of
from shoal.bench.results import Record, merge


def with_rounds(engine: str, *rounds: tuple[float, ...]) -> Record:
    """A record whose rounds have these steps."""
    record = make_record(engine, 1.0)
    compute = [ComputeRound(forward_backward_ms=ms, wall_ms=ms, host_ms=ms) for ms in rounds]
    figures = summarise("cuda", make_built(), compute, list(record.optimizer_rounds))
    return replace(record, figures=figures, compute_rounds=tuple(compute))


def test_the_median_is_of_ratios_within_a_round() -> None:
    """The machine was twice as slow in the second round, for both: that is no difference."""
    plain = with_rounds("plain", (10.0, 10.0, 99.0), (20.0,), (11.0,))
    shoal = with_rounds("shoal", (12.0,), (24.0,), (11.0, 22.0, 11.0))
    results = make_results(plain, shoal)
    assert ratio_of(results, shoal, "plain") == Ratio(1.2, 1.1)


@pytest.mark.parametrize("rounds", [[(10.0,)], [(10.0,), (20.0,), (11.0,)]])
def test_rounds_that_do_not_pair_have_no_median(rounds: list[tuple[float, ...]]) -> None:
    plain, shoal = with_rounds("plain", *rounds), with_rounds("shoal", (12.0,), (24.0,))
    ratio = ratio_of(make_results(plain, shoal), shoal, "plain")
    assert ratio == Ratio(None, 1.2)


def test_rounds_of_two_calls_do_not_pair() -> None:
    plain, shoal = with_rounds("plain", (10.0,)), with_rounds("shoal", (12.0,))
    results = merge([("a", make_results(plain)), ("b", make_results(shoal))], "merge")
    found = next(record for record in results.records if record.engine == "shoal")
    assert ratio_of(results, found, "plain") == Ratio(None, 1.2)


def test_no_reference_no_ratio() -> None:
    shoal = with_rounds("shoal", (12.0,))
    assert ratio_of(make_results(shoal), shoal, "plain") is None

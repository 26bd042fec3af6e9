import math

import pytest

from shoal.report.number_format import count, digits, duration, percent, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.5, "1.50"),
        (9.996, "10.0"),
        (123.4, "123"),
        (999.7, "1,000"),
        (12345.6, "12,346"),
        (0.012345, "0.0123"),
        (-2.5, "−2.50"),
        (3e-7, "3.00e−7"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
    ],
)
def test_digits(value: float, text: str) -> None:
    assert digits(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1 k"),
        (12_345, "12.3 k"),
        (6_342_912, "6.34 M"),
        (7e9, "7 B"),
        (999_950, "1 M"),
    ],
)
def test_count(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (512, "512 B"), (1536, "1.5 KiB"), (320 * 2**20, "320 MiB"), (2**30, "1 GiB")],
)
def test_size(value: float, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00035, "350 µs"),
        (0.0123, "12.3 ms"),
        (0.99999, "1.00 s"),
        (59.96, "1 min 00 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (11_220, "3 h 07 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0 %"), (0.0004, "< 0.1 %"), (0.031, "3.1 %"), (0.0999, "10 %"), (0.824, "82 %")],
)
def test_percent(share: float, text: str) -> None:
    assert percent(share) == text

"""Numbers as a reader wants them: a few digits, a unit, never an exponent of ten in the way."""

from __future__ import annotations

import math
from decimal import Decimal

_THOUSANDS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def digits(value: float, significant: int = 3) -> str:
    """Write a number with so many significant digits: 0.012, 1.23, 123, 12,346, 1.2e-07."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    # One rounding decides the digits and the exponent together: 9.996 must become 10.0, not 10.00.
    rounded = Decimal(f"{value:.{significant - 1}e}")
    exponent = rounded.adjusted()
    if not -4 <= exponent < 15:
        return f"{rounded:.{significant - 1}e}".replace("-", "−")
    if exponent >= significant - 1:
        rounded = Decimal(round(value))
    return f"{rounded:,.{max(0, significant - 1 - exponent)}f}".replace("-", "−")


def count(value: float) -> str:
    """Write a large number shortly: 950, 12.3 k, 4.56 M, 7 B."""
    return _scaled(value, _THOUSANDS, "")


def size(num_bytes: float) -> str:
    """Write a number of bytes: 512 B, 1.5 MiB, 12.3 GiB."""
    return _scaled(num_bytes, _BINARY, "B")


def duration(seconds: float) -> str:
    """Write a length of time: 350 µs, 12.3 ms, 4.56 s, 2 min 05 s, 3 h 07 min."""
    if not math.isfinite(seconds):
        return digits(seconds)
    if seconds < 0.9995e-3:
        return f"{digits(seconds * 1e6)} µs"
    if seconds < 0.9995:
        return f"{digits(seconds * 1e3)} ms"
    if seconds < 59.95:
        return f"{digits(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def percent(share: float) -> str:
    """Write a share of one: 42 %, 3.1 %, < 0.1 %."""
    if 0 < share < 0.001:
        return "< 0.1 %"
    return f"{share * 100:.0f} %" if share >= 0.0995 or share == 0 else f"{share * 100:.1f} %"


def _scaled(value: float, steps: tuple[tuple[int, str], ...], base: str) -> str:
    if not math.isfinite(value):
        return digits(value)
    for factor, name in steps:
        # The limit is where three digits would round up to the next unit: 999.6 k is 1 M.
        if abs(value) >= factor * 0.9995:
            return f"{_plain(value / factor)} {name}"
    return f"{_plain(value)} {base}".rstrip()


def _plain(value: float) -> str:
    text = digits(value)
    return text.rstrip("0").rstrip(".") if "." in text else text

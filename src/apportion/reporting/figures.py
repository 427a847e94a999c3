"""Numbers as they are printed: rates, shares, ratios and errors. Sizes and times are in `units`."""

from __future__ import annotations

import math


def format_rate(value: float) -> str:
    """Return a rate with at least three digits: `5,762`, `87.3`, `1.25`, `0.0312`."""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def format_share(fraction: float) -> str:
    """Return a fraction as a percentage: `30.3%`; `<0.1%` for what would read as nothing."""
    if not math.isfinite(fraction):
        return str(fraction)
    return "<0.1%" if 0 < fraction < 0.0005 else f"{fraction * 100:.1f}%"


def format_ratio(ratio: float) -> str:
    """Return measured over predicted: `1.03x`; `-` where there is none."""
    return f"{ratio:.2f}x" if ratio > 0 else "-"


def format_loss(loss: float) -> str:
    """Return a loss with five decimals, or in powers of ten where those would hide it."""
    if not math.isfinite(loss):
        return str(loss)
    return f"{loss:.4e}" if loss != 0 and (abs(loss) < 1e-3 or abs(loss) >= 1e6) else f"{loss:.5f}"


def format_error(error: float) -> str:
    """Return a relative error: `2.1e-07`, `0` for bit equality."""
    return "0" if error == 0 else f"{error:.1e}"


def describe_difference(
    measured: float, predicted: float, *, more: str = "longer", less: str = "shorter"
) -> str:
    """Return how far a measurement lies from its prediction: `3% longer than predicted`."""
    change = measured / predicted - 1
    if abs(change) < 0.01:
        return "as predicted"
    if measured >= 2 * predicted:
        return f"{format_rate(measured / predicted)} times what was predicted"
    return f"{abs(change):.0%} {more if change > 0 else less} than predicted"


def plural(count: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`, `1,024 ranks`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"

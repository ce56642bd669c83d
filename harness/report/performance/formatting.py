"""Numbers as they stand in the page and the plots."""

from __future__ import annotations

import math

NOT_APPLICABLE = "n/a"


def decimals(value: float | None) -> str:
    """Writes three significant digits without an exponent: 0.0123, 4.56, 7890; `n/a` for None."""
    if value is None:
        return NOT_APPLICABLE
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def duration(seconds: float | None) -> str:
    """Writes a time in seconds from one second on, otherwise in milliseconds."""
    if seconds is None:
        return NOT_APPLICABLE
    return f"{decimals(seconds)} s" if seconds >= 1 else f"{decimals(seconds * 1e3)} ms"


def percent(share: float | None) -> str:
    """Writes a share as per cent: 82 %; small ones with a decimal."""
    if share is None:
        return NOT_APPLICABLE
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def giga(value: float | None) -> str:
    """Writes billions: 511."""
    return NOT_APPLICABLE if value is None else decimals(value / 1e9)


def factor(value: float) -> str:
    """Writes a ratio with two decimals below 10 and one above: 2.41, 12.3."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def gain(value: float) -> str:
    """Writes a ratio as per cent above 1: +4.2 %."""
    return f"{100 * (value - 1):+.1f} %".replace("-", "−")

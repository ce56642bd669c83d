"""Converts floats to and from JSON, which has no NaN and no infinity."""

from __future__ import annotations

import math


def number(value: float | str | None) -> float:
    """Returns a metric of the JSON as a float: null is NaN, "inf" and "-inf" are the infinities."""
    return math.nan if value is None else float(value)


def jsonable(value: float) -> float | str | None:
    """Returns a float in the form that `number` reads."""
    if math.isnan(value):
        return None
    return str(value) if math.isinf(value) else value

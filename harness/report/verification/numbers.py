"""Floats in JSON, which has no NaN and no infinity, and whether data has the form that is promised."""

from __future__ import annotations

import math
from typing import Any


def number(value: float | str | None) -> float:
    """Reads a metric of the JSON as a float: null is NaN, "inf" and "-inf" are the infinities."""
    return math.nan if value is None else float(value)


def jsonable(value: float) -> float | str | None:
    """Writes a float as `number` reads it."""
    if math.isnan(value):
        return None
    return str(value) if math.isinf(value) else value


def fits(data: Any, form: Any) -> bool:
    """Returns whether data read from JSON has a form.

    Args:
        data: What was read.
        form: A dict of the keys that it must have, with the form of each; a list with the form of every item; a tuple
            of forms, one of which must fit; `float` for what `number` reads; None; another type.
    """
    if isinstance(form, dict):
        return isinstance(data, dict) and all(key in data and fits(data[key], part) for key, part in form.items())
    if isinstance(form, list):
        return isinstance(data, list) and all(fits(item, form[0]) for item in data)
    if isinstance(form, tuple):
        return any(fits(data, choice) for choice in form)
    if form is None or isinstance(data, bool):
        return data is form or form is bool
    if form is float:
        return data is None or isinstance(data, int | float) or data in ("inf", "-inf")
    return isinstance(data, form)

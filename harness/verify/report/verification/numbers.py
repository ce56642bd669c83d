"""Converts floats to and from JSON, which has no NaN and no infinity, and checks the form of data."""

from __future__ import annotations

import math
from typing import Any


def number(value: float | str | None) -> float:
    """Returns a metric of the JSON as a float: null is NaN, "inf" and "-inf" are the infinities."""
    return math.nan if value is None else float(value)


def jsonable(value: float) -> float | str | None:
    """Returns a float in the form that `number` reads."""
    if math.isnan(value):
        return None
    return str(value) if math.isinf(value) else value


def has_form(data: Any, form: Any) -> bool:
    """Returns whether data that were read from JSON have a form.

    Args:
        data: The data.
        form: A dict of the required keys, with the form of each; a list with the form of every item; a tuple of forms,
            one of which must fit; `float` for values that `number` reads; None; another type.
    """
    if isinstance(form, dict):
        return isinstance(data, dict) and all(key in data and has_form(data[key], part) for key, part in form.items())
    if isinstance(form, list):
        return isinstance(data, list) and all(has_form(item, form[0]) for item in data)
    if isinstance(form, tuple):
        return any(has_form(data, choice) for choice in form)
    if form is None or isinstance(data, bool):
        return data is form or form is bool
    if form is float:
        return data is None or isinstance(data, int | float) or data in ("inf", "-inf")
    return isinstance(data, form)

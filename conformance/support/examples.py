"""Sets the number of examples of a property."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

MORE = {"explore": 10}
"""Factors of the number of examples, by profile of Hypothesis; `conftest.py` has the profiles."""


def examples(count: int, **others: Any) -> settings:
    """Returns the settings of a property that is shown that many examples in `make test`, and more where asked.

    Args:
        count: The number of examples.
        others: Other settings of Hypothesis.
    """
    return settings(max_examples=count * MORE.get(settings.get_current_profile_name(), 1), **others)

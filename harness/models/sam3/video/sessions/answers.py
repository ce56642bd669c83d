"""Answers of a session as arrays with names, which a cache and a file can hold."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from harness.core.program import Arrays


def numbered(answers: Iterable[tuple[int, Arrays]]) -> Arrays:
    """The arrays of all frames that a session gave out, in order.

    Args:
        answers: Of each frame the position of the request that it answers, and its arrays by name.

    Returns:
        Those of the first frame are `0/request`, int64 [1], `0/ids` and so on.
    """
    arrays: Arrays = {}
    for number, (position, answer) in enumerate(answers):
        arrays[f"{number}/request"] = np.array([position])
        arrays |= {f"{number}/{name}": array for name, array in answer.items()}
    return arrays

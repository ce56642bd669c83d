"""Names the arrays of a session's answers, for the cache and for files."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from harness.core.program import Arrays


def number_frames(answers: Iterable[tuple[int, Arrays]]) -> Arrays:
    """Returns the arrays of all frames that a session returned, in order.

    Args:
        answers: For each frame, the position of the request that it answers, and its arrays by name.

    Returns:
        The arrays by name; the first frame has `0/request`, int64 [1], `0/ids` and so on.
    """
    arrays: Arrays = {}
    for number, (position, answer) in enumerate(answers):
        arrays[f"{number}/request"] = np.array([position])
        arrays |= {f"{number}/{name}": array for name, array in answer.items()}
    return arrays

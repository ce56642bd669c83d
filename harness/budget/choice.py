"""Which groups are half precision: as much time saved as there is, within a limit on the error of every output.

Rounding errors of different groups are nearly independent, so that their squares add. This is a knapsack with one
capacity for each output, a mixed-integer program that HiGHS solves exactly (`scipy.optimize.milp`; Huangfu and Hall,
Parallelizing the dual revised simplex method, 2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Contribution:
    """What one group does in half precision, everything else being float32.

    Attributes:
        group: Name of the group.
        saved: Seconds that it saves; not above 0 if it saves none.
        squares: By output: how much larger the squared error is than in float32, in squares of r_rms.
    """

    group: str
    saved: float
    squares: Mapping[str, float]


def choose(contributions: Sequence[Contribution], capacities: Mapping[str, float]) -> frozenset[str]:
    """Returns the groups that are half precision.

    No other choice within the capacities saves more; a group that saves nothing is never chosen.

    Args:
        contributions: Of each group.
        capacities: By output: what the squares of the chosen groups may add up to.
    """
    useful = [each for each in contributions if each.saved > 0 and _fits([each], capacities)]
    if not useful or _fits(useful, capacities):
        return frozenset(each.group for each in useful)
    refused: list[list[int]] = []
    while True:
        chosen = _solved(useful, capacities, refused)
        if _fits([useful[n] for n in chosen], capacities):
            return frozenset(useful[n].group for n in chosen)
        refused.append(chosen)


def predicted(base: Mapping[str, float], contributions: Iterable[Contribution]) -> dict[str, float]:
    """Returns r_rms of each output if some groups are half precision.

    Args:
        base: r_rms of each output in float32.
        contributions: Of these groups.
    """
    chosen = list(contributions)
    return {
        output: math.sqrt(math.fsum([value**2, *(each.squares[output] for each in chosen)]))
        for output, value in base.items()
    }


def _fits(chosen: Sequence[Contribution], capacities: Mapping[str, float]) -> bool:
    return all(
        math.fsum(each.squares[output] for each in chosen) <= capacity for output, capacity in capacities.items()
    )


def _solved(
    useful: Sequence[Contribution], capacities: Mapping[str, float], refused: Sequence[Sequence[int]]
) -> list[int]:
    """Returns the numbers of the best groups; HiGHS lets capacities be exceeded by a tolerance.

    Args:
        useful: The groups to choose from.
        capacities: As for `choose`.
        refused: Choices that exceed a capacity; none of them, nor one that has all of it, is returned.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    total = math.fsum(each.saved for each in useful)
    rows: list[Any] = []
    for output, capacity in capacities.items():
        squares = np.array([each.squares[output] for each in useful])
        largest = squares.max(initial=0.0)
        if largest > 0:
            # In units of the largest one, because HiGHS's tolerances are absolute.
            rows.append(LinearConstraint(squares / largest, -np.inf, capacity / largest))
    for choice in refused:
        row = np.zeros(len(useful))
        row[list(choice)] = 1
        rows.append(LinearConstraint(row, -np.inf, len(choice) - 1))
    solved = milp(
        -np.array([each.saved for each in useful]) / total * 1e3,
        constraints=rows,
        integrality=np.ones(len(useful)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:  # nothing is left that is not refused
        return []
    return [n for n, value in enumerate(solved.x) if value > 0.5]

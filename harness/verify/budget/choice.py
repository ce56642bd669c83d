"""Chooses the groups in half precision that save most time within a limit on the error of every output.

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
    """The effects of one group in half precision, with everything else in float32.

    Attributes:
        group: Name of the group.
        saved: Seconds that the group saves; not above 0 if it saves none.
        squares: By output, the increase of the squared error over float32, in squares of r_rms.
    """

    group: str
    saved: float
    squares: Mapping[str, float]


def choose(contributions: Sequence[Contribution], capacities: Mapping[str, float]) -> frozenset[str]:
    """Returns the names of the groups to compute in half precision.

    No other choice within the capacities saves more time; a group that saves nothing is never chosen.

    Args:
        contributions: Contributions of all groups.
        capacities: By output, the limit on the sum of the squares of the chosen groups.
    """
    useful = [
        contribution for contribution in contributions if contribution.saved > 0 and _fits([contribution], capacities)
    ]
    if not useful or _fits(useful, capacities):
        return frozenset(contribution.group for contribution in useful)
    refused: list[list[int]] = []
    while True:
        chosen = _solve(useful, capacities, refused)
        if _fits([useful[n] for n in chosen], capacities):
            return frozenset(useful[n].group for n in chosen)
        refused.append(chosen)


def predict_errors(base: Mapping[str, float], contributions: Iterable[Contribution]) -> dict[str, float]:
    """Returns the predicted r_rms of each output if some groups are half precision.

    Args:
        base: r_rms of each output in float32.
        contributions: Contributions of these groups.
    """
    chosen = list(contributions)
    return {
        output: math.sqrt(math.fsum([value**2, *(contribution.squares[output] for contribution in chosen)]))
        for output, value in base.items()
    }


def _fits(chosen: Sequence[Contribution], capacities: Mapping[str, float]) -> bool:
    return all(
        math.fsum(contribution.squares[output] for contribution in chosen) <= capacity
        for output, capacity in capacities.items()
    )


def _solve(
    useful: Sequence[Contribution], capacities: Mapping[str, float], refused: Sequence[Sequence[int]]
) -> list[int]:
    """Returns the indices of the best groups; HiGHS lets capacities be exceeded by a tolerance.

    Args:
        useful: Contributions of the groups to choose from.
        capacities: As for `choose`.
        refused: Choices that exceed a capacity; neither they nor choices that include them are returned.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    total = math.fsum(contribution.saved for contribution in useful)
    rows: list[Any] = []
    for output, capacity in capacities.items():
        squares = np.array([contribution.squares[output] for contribution in useful])
        largest = squares.max(initial=0.0)
        if largest > 0:
            # Relative to the largest one, because HiGHS's tolerances are absolute.
            rows.append(LinearConstraint(squares / largest, -np.inf, capacity / largest))
    for choice in refused:
        row = np.zeros(len(useful))
        row[list(choice)] = 1
        rows.append(LinearConstraint(row, -np.inf, len(choice) - 1))
    solution = milp(
        -np.array([contribution.saved for contribution in useful]) / total * 1e3,
        constraints=rows,
        integrality=np.ones(len(useful)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if solution.x is None:  # every choice is refused
        return []
    return [n for n, value in enumerate(solution.x) if value > 0.5]

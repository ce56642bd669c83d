"""Computes minimal filtering (Winograd, Toom–Cook): a sliding sum with fewer multiplications, as three small matrices.

m neighbouring outputs of a filter of r taps take m + r - 1 multiplications instead of m·r:

    outputs = after · ((filters · g) ⊙ (before · d))

A product of polynomials of degrees m - 1 and r - 1 is known from its values at m + r - 1 points, one of which may be
infinity; transposing that statement gives the three matrices (Toom 1963, Winograd 1980). They are exact rationals here.
The further the powers of the points are from 1, the more rounding errors are amplified.

An image whose pixels are repeated has equal neighbours, which takes still fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

Matrix = tuple[tuple[Fraction, ...], ...]


@dataclass(frozen=True)
class Filtering:
    """The three matrices of one dimension.

    Attributes:
        before: Matrix of the inputs, [m + r - 1, m + r - 1].
        filters: Matrix of the taps, [m + r - 1, r].
        after: Matrix of the products, [m, m + r - 1].
        repeats: Number of repetitions of each pixel in the convolved image; the inputs are the pixels before them.
    """

    before: Matrix
    filters: Matrix
    after: Matrix
    repeats: int = 1

    @property
    def inputs(self) -> int:
        """Returns the number of neighbouring inputs, and of multiplications: m + r - 1."""
        return len(self.before)

    @property
    def outputs(self) -> int:
        """Returns the number of neighbouring outputs: m."""
        return len(self.after)

    @property
    def step(self) -> int:
        """Returns the number of inputs from those of m outputs to those of the next m."""
        return self.outputs // self.repeats


def _matrix(*rows: Sequence[int]) -> Matrix:
    return tuple(tuple(map(Fraction, row)) for row in rows)


UPSAMPLED = Filtering(
    before=_matrix((0, 1, 0), (-1, 1, 0), (0, -1, 1)),
    filters=_matrix((1, 1, 1), (-1, 0, 0), (0, 0, 1)),
    after=_matrix((1, 1, 0), (1, 0, 1)),
    repeats=2,
)
"""A filter of three taps where every input is repeated once (nearest neighbours): three multiplications instead of six.

With the inputs x, the outputs 2i and 2i + 1 are Σg · xᵢ - g₀ · (xᵢ - xᵢ₋₁) and Σg · xᵢ + g₂ · (xᵢ₊₁ - xᵢ).
"""


def minimal_filtering(taps: int, points: Sequence[Fraction | int]) -> Filtering:
    """Computes the filtering that evaluates polynomials at these distinct points and at infinity.

    Args:
        taps: Length r of the filter.
        points: m + r - 2 of them.
    """
    places = [Fraction(point) for point in points]
    outputs = len(places) + 2 - taps
    before, filters = [], []
    for point in places:
        others = [other for other in places if other != point]
        product = Fraction(1)
        for other in others:
            product *= point - other
        before.append((*_polynomial(others), Fraction(0)))
        filters.append(tuple(point**power / product for power in range(taps)))
    before.append(_polynomial(places))
    filters.append((*[Fraction(0)] * (taps - 1), Fraction(1)))
    after = tuple(
        (*(point**power for point in places), Fraction(1 if power == outputs - 1 else 0)) for power in range(outputs)
    )
    return Filtering(tuple(before), tuple(filters), after)


def _polynomial(roots: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Returns the coefficients of ∏ (x - root), the constant first."""
    result = [Fraction(1)]
    for root in roots:
        shifted, scaled = [Fraction(0), *result], [*(-root * value for value in result), Fraction(0)]
        result = [a + b for a, b in zip(shifted, scaled, strict=True)]
    return tuple(result)

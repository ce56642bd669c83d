"""Measures the error of a value relative to PyTorch's own, and describes faults: the elements that are wrong.

Two faults can be compared, to tell whether a smaller program is wrong in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from harness.core.program import Array
from harness.parity import metrics
from harness.parity.verdict import ORACLE_R_INF, ORACLE_R_RMS


@dataclass(frozen=True)
class Deviation:
    """The error of one value against float64, divided by PyTorch fp32's own (`harness.parity.metrics.oracle_ratio`).

    Attributes:
        r_rms, r_inf: Ratios of the root mean squares and of the largest magnitudes; inf if integers, booleans, NaN or
            infinities differ.
        error: Root mean square of the error, divided by that of the value.
        torch_error: PyTorch's root mean square error, divided likewise.
        wrong: Number of elements that differ although they must be equal: integers, booleans, NaN and infinities.
    """

    r_rms: float
    r_inf: float
    error: float
    torch_error: float
    wrong: int = 0

    @property
    def excess(self) -> float:
        """The error relative to the limits of the oracle verdict."""
        ratio = max(self.r_rms / ORACLE_R_RMS, self.r_inf / ORACLE_R_INF)
        return 0.0 if math.isnan(ratio) else ratio

    @property
    def is_fault(self) -> bool:
        """Returns whether the error exceeds the limits of the oracle verdict."""
        return self.excess > 1


def deviation(actual: Array, torch_value: Array, exact: Array) -> Deviation:
    """Measures a value against float64; all three arrays have one shape.

    Args:
        actual: The compiled program's value.
        torch_value: PyTorch's value, of the same dtype.
        exact: PyTorch's value in float64; integers and booleans unchanged.
    """
    if metrics.is_exact(torch_value.dtype):
        # if float64 and fp32 decide differently, both are right
        wrong = int(np.count_nonzero((actual != torch_value) & (actual != exact)))
        return Deviation(math.inf if wrong else 0.0, math.inf if wrong else 0.0, math.nan, math.nan, wrong)
    wrong = int(np.count_nonzero(~_same_specials(actual, torch_value, exact)))
    if wrong:
        return Deviation(math.inf, math.inf, math.inf, metrics.relative_rms(torch_value, exact), wrong)
    ratio = metrics.oracle_ratio(actual, torch_value, exact)
    error, torch_error = (metrics.relative_rms(value, exact) for value in (actual, torch_value))
    return Deviation(ratio.r_rms, ratio.r_inf, error, torch_error)


def _same_specials(actual: Array, torch_value: Array, exact: Array) -> Array:
    """Returns where NaN and infinities are right: where float64 and fp32 overflow differently, both are."""
    return metrics.same_specials(actual, torch_value) | metrics.same_specials(actual, exact)


_COMMON_SHARE = 0.9
"""Share of the elements wrong in either value that must be wrong in both for the fault to be the same."""


class Kind(StrEnum):
    """The way in which an element is wrong."""

    UNEQUAL = "is not equal"
    SPECIAL = "is NaN or infinite, or should be"
    VALUE = "is off by more than rounding"


@dataclass(frozen=True)
class Fault:
    """The wrong elements of a value, one bit each.

    Attributes:
        kind: The way in which the first of them is wrong.
        shape: Shape of the value.
        packed: Whether each element is wrong, in C order, eight per byte (`numpy.packbits`).
    """

    kind: Kind
    shape: tuple[int, ...]
    packed: bytes

    @classmethod
    def from_value(cls, deviation: Deviation, actual: Array, torch_value: Array, exact: Array) -> Fault | None:
        """Returns the fault of a value; None if its error is within the limits.

        Args:
            deviation: Deviation of the value.
            actual: The value.
            torch_value: PyTorch's value, of the same shape.
            exact: The float64 value.
        """
        if not deviation.is_fault:
            return None
        if metrics.is_exact(torch_value.dtype):
            kind, wrong = Kind.UNEQUAL, (actual != torch_value) & (actual != exact)
        elif deviation.wrong:
            kind, wrong = Kind.SPECIAL, ~_same_specials(actual, torch_value, exact)
        else:
            with np.errstate(all="ignore"):
                error = np.abs(actual.astype(np.float64) - exact)
                error = np.where(np.isfinite(error), error, 0)
            # A ratio is an error over a unit, so an element may be off by as much as the limit of the exceeded ratio.
            if deviation.r_inf > ORACLE_R_INF:
                limit = ORACLE_R_INF / deviation.r_inf * np.max(error)
            else:
                limit = ORACLE_R_RMS / deviation.r_rms * float(np.sqrt(np.mean(np.square(error))))
            kind, wrong = Kind.VALUE, error > limit
        return cls(kind, actual.shape, np.packbits(wrong).tobytes())

    @property
    def wrong(self) -> Array:
        """Returns whether each element is wrong, as an array."""
        count = math.prod(self.shape)
        bits = np.unpackbits(np.frombuffer(self.packed, np.uint8), count=count)
        return bits.astype(bool).reshape(self.shape)

    def part(self, slices: tuple[slice, ...]) -> Fault:
        """Returns the fault of a part of the value."""
        wrong = self.wrong[slices]
        return Fault(self.kind, wrong.shape, np.packbits(wrong).tobytes())

    def same(self, fault: Fault | None) -> bool:
        """Returns whether another value is wrong in the same way and, for nine tenths, at the same elements."""
        if fault is None or fault.kind is not self.kind or fault.shape != self.shape:
            return False
        wrong, other_wrong = self.wrong, fault.wrong
        either = int(np.count_nonzero(wrong | other_wrong))
        return bool(either) and int(np.count_nonzero(wrong & other_wrong)) >= _COMMON_SHARE * either

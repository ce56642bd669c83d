"""Describes faults: which elements of a value are wrong, and in which way, so that smaller programs can be compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.diagnose.deviation import Deviation
from harness.parity import metrics
from harness.parity.verdict import ORACLE_R_INF, ORACLE_R_RMS

Array = npt.NDArray[Any]

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
        if not deviation.excess > 1:
            return None
        kind, wrong = _wrong_elements(deviation, actual, torch_value, exact)
        return cls(kind, actual.shape, np.packbits(wrong).tobytes())

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
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


def _wrong_elements(deviation: Deviation, actual: Array, torch_value: Array, exact: Array) -> tuple[Kind, Array]:
    if metrics.is_exact(torch_value.dtype):
        return Kind.UNEQUAL, (actual != torch_value) & (actual != exact)
    if deviation.wrong:
        return Kind.SPECIAL, ~(metrics.same_specials(actual, torch_value) | metrics.same_specials(actual, exact))
    with np.errstate(all="ignore"):
        error = np.abs(actual.astype(np.float64) - exact)
        error = np.where(np.isfinite(error), error, 0)
    # A ratio is an error divided by a unit, so an element may be off by as much as the limit of the exceeded ratio.
    if deviation.r_inf > ORACLE_R_INF:
        return Kind.VALUE, error > ORACLE_R_INF / deviation.r_inf * np.max(error)
    return Kind.VALUE, error > ORACLE_R_RMS / deviation.r_rms * float(np.sqrt(np.mean(np.square(error))))

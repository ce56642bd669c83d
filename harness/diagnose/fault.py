"""A fault: which elements of a value are wrong and how, so that a smaller program can be held to show the same one."""

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

_ALIKE = 0.9
"""The part of the wrong elements of two values, each counted once, that both must have for the fault to be the same."""


class Kind(StrEnum):
    """How an element is wrong."""

    UNEQUAL = "is not equal"
    SPECIAL = "is NaN or infinite, or should be"
    VALUE = "is off by more than rounding"


@dataclass(frozen=True)
class Fault:
    """The wrong elements of a value; a bit each.

    Attributes:
        kind: How the first of them is wrong.
        shape: Shape of the value.
        packed: Whether each element is wrong, in C order, eight to a byte (`numpy.packbits`).
    """

    kind: Kind
    shape: tuple[int, ...]
    packed: bytes

    @classmethod
    def of(cls, found: Deviation, actual: Array, torch_value: Array, exact: Array) -> Fault | None:
        """Returns the fault of a value; None if its error is within the limits.

        Args:
            found: The deviation of the value.
            actual: The value.
            torch_value: PyTorch's, of the same shape.
            exact: Float64's.
        """
        if not found.excess > 1:
            return None
        kind, wrong = _wrong(found, actual, torch_value, exact)
        return cls(kind, actual.shape, np.packbits(wrong).tobytes())

    @property
    def wrong(self) -> npt.NDArray[np.bool_]:
        """Whether each element is wrong."""
        count = math.prod(self.shape)
        bits = np.unpackbits(np.frombuffer(self.packed, np.uint8), count=count)
        return bits.astype(bool).reshape(self.shape)

    def part(self, slices: tuple[slice, ...]) -> Fault:
        """Returns the fault of a part of the value."""
        wrong = self.wrong[slices]
        return Fault(self.kind, wrong.shape, np.packbits(wrong).tobytes())

    def same(self, other: Fault | None) -> bool:
        """Returns whether another value is wrong in the same way and, nine tenths of them, the same elements."""
        if other is None or other.kind is not self.kind or other.shape != self.shape:
            return False
        mine, its = self.wrong, other.wrong
        either = int(np.count_nonzero(mine | its))
        return bool(either) and int(np.count_nonzero(mine & its)) >= _ALIKE * either


def _wrong(found: Deviation, actual: Array, torch_value: Array, exact: Array) -> tuple[Kind, Array]:
    if metrics.is_exact(torch_value.dtype):
        return Kind.UNEQUAL, (actual != torch_value) & (actual != exact)
    if found.wrong:
        return Kind.SPECIAL, ~(metrics.same_specials(actual, torch_value) | metrics.same_specials(actual, exact))
    with np.errstate(all="ignore"):
        error = np.abs(actual.astype(np.float64) - exact)
        error = np.where(np.isfinite(error), error, 0)
    # A ratio is an error divided by a unit; an element may be as far off as the limit of the ratio that is broken says.
    if found.r_inf > ORACLE_R_INF:
        return Kind.VALUE, error > ORACLE_R_INF / found.r_inf * np.max(error)
    return Kind.VALUE, error > ORACLE_R_RMS / found.r_rms * float(np.sqrt(np.mean(np.square(error))))

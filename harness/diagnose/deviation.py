"""Measures how far a value of the compiled program is from float64, relative to PyTorch's own error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.parity import metrics
from harness.parity.verdict import ORACLE_R_INF, ORACLE_R_RMS

Array = npt.NDArray[Any]


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
        """The error relative to the limits of the oracle verdict; a value above 1 is a fault."""
        ratio = max(self.r_rms / ORACLE_R_RMS, self.r_inf / ORACLE_R_INF)
        return 0.0 if math.isnan(ratio) else ratio


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
    # if float64 and fp32 overflow differently, both are right
    equal_specials = metrics.same_specials(actual, torch_value) | metrics.same_specials(actual, exact)
    wrong = int(np.count_nonzero(~equal_specials))
    if wrong:
        return Deviation(math.inf, math.inf, math.inf, metrics.relative_rms(torch_value, exact), wrong)
    ratio = metrics.oracle_ratio(actual, torch_value, exact)
    error, torch_error = (metrics.relative_rms(value, exact) for value in (actual, torch_value))
    return Deviation(ratio.r_rms, ratio.r_inf, error, torch_error)

"""How far a value of the compiled program is from float64, beside how far PyTorch's own is."""

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
    """The error of one value against float64, in units of PyTorch fp32's own (`harness.parity.metrics.oracle_ratio`).

    Attributes:
        r_rms, r_inf: The ratio of root mean squares, and of the largest magnitudes; inf where integers, booleans, NaN
            or infinities differ.
        error: Root mean square of the error, divided by that of the value.
        torch_error: The same of PyTorch.
        wrong: Elements that differ although they had to be equal: integers, booleans, NaN and infinities.
    """

    r_rms: float
    r_inf: float
    error: float
    torch_error: float
    wrong: int = 0

    @property
    def excess(self) -> float:
        """How far it is above honest rounding, whose limits are those of the oracle verdict: above 1 is a fault."""
        found = max(self.r_rms / ORACLE_R_RMS, self.r_inf / ORACLE_R_INF)
        return 0.0 if math.isnan(found) else found


def deviation(actual: Array, torch_value: Array, exact: Array) -> Deviation:
    """Measures a value against float64; all three have one shape.

    Args:
        actual: The compiled program's.
        torch_value: PyTorch's, of the same dtype.
        exact: PyTorch's in float64; integers and booleans as they are.
    """
    if metrics.is_exact(torch_value.dtype):
        # where float64 decides otherwise than fp32, either is right
        wrong = int(np.count_nonzero((actual != torch_value) & (actual != exact)))
        return Deviation(math.inf if wrong else 0.0, math.inf if wrong else 0.0, math.nan, math.nan, wrong)
    # where float64 overflows otherwise than fp32, either is right
    same = metrics.same_specials(actual, torch_value) | metrics.same_specials(actual, exact)
    wrong = int(np.count_nonzero(~same))
    if wrong:
        return Deviation(math.inf, math.inf, math.inf, metrics.relative_rms(torch_value, exact), wrong)
    ratio = metrics.oracle_ratio(actual, torch_value, exact)
    error, torch_error = (metrics.relative_rms(value, exact) for value in (actual, torch_value))
    return Deviation(ratio.r_rms, ratio.r_inf, error, torch_error)

"""Converts memories to bfloat16, in which upstream keeps them, as uint16 bits because NumPy lacks the dtype."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]
_QUIET_NAN = np.uint16(0x7FC0)


def to_bfloat16(values: npt.NDArray[np.float32]) -> Bits:
    """Returns the bits of fp32 values rounded to bfloat16, half to even, as PyTorch rounds.

    Every NaN becomes the quiet one.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Adds half of the dropped bits, less one where the last kept bit is even; the carry into the exponent is correct.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), _QUIET_NAN, rounded)


def from_bfloat16(bits: Bits) -> npt.NDArray[np.float32]:
    """Returns the fp32 values of bfloat16 bits, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

"""Reads shapes and constants of Relax values in converters."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import ir, relax


def shape_of(value: relax.Expr) -> list[int]:
    """Returns the static shape of a Relax tensor."""
    return [int(extent) for extent in value.ty.shape]


def constant_of(value: Any) -> NDArray[Any] | None:
    """Returns the values of a Relax constant, None for any other value."""
    return np.asarray(value.value.numpy()) if isinstance(value, ir.GenericConst) else None

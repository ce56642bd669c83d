"""Provides the arithmetic of attention's softmax, where every key of a query may be masked."""

from __future__ import annotations

import math

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import fp32
from harness.compiler.schedules.cpu.emit import for_each_vector


def finite(score: T.Expr) -> T.Expr:
    """Returns a highest score, and 0 for -inf: exp(-inf - -inf) would be NaN where every key is masked."""
    return T.Select(T.EQ(score, fp32(-math.inf)), fp32(0.0), score)


def normalized(value: T.Expr, weight: T.Expr) -> T.Expr:
    """Returns a sum of weighted values divided by the sum of the weights; zero if that is zero."""
    return T.Select(T.EQ(weight, fp32(0.0)), fp32(0.0), value / weight)


def fill(buffer: T.Buffer, lanes: int, value: float, *row: T.Index) -> None:
    """Emits buffer[row, j] = value for all j; a buffer of one dimension has one row, ()."""
    for_each_vector(int(buffer.shape[-1]), lanes, lambda j: T.buffer_store(buffer, fp32(value), [*row, j]))

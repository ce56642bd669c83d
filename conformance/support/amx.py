"""Provides a target with the matrix unit of x86, and computes its sums in NumPy."""

from __future__ import annotations

import numpy as np
import tvm

from conformance.support.bf16 import rounded
from harness.compiler.schedules.cpu.microkernels.amx import TILE_PAIRS
from harness.runtime.cpu import MATRIX_UNIT


def target_with_tiles(cpu: str) -> tvm.target.Target:
    """Returns the target of an x86 processor of that name, with a matrix unit."""
    mattr = [f"+{feature}" for feature in MATRIX_UNIT]
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mtriple": "x86_64-linux-gnu", "mattr": mattr})


def product_in_tiles(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns the unit's product of matrices [m, k] and [n, k] without denormal numbers, both rounded to bfloat16."""
    sums = np.zeros((len(x), len(weight)), np.float32)
    left, right = (rounded(array).astype(np.float64) for array in (x, weight))
    for step in range(0, x.shape[1] // 2, TILE_PAIRS):
        sums = sums + _in_tile(left, right, step)
    return sums


def _in_tile(left: np.ndarray, right: np.ndarray, first: int) -> np.ndarray:
    """Returns the sums of TDPBF16PS of Intel's manual for bfloat16 matrices [m, k] and [n, k] in float64.

    A pair is terms k and k + depth / 2. Products of bfloat16 have 16 bits, so that float64 holds what decides how a sum
    of one and of an fp32 number is rounded.
    """
    pairs = left.shape[1] // 2
    sums = np.zeros((2, len(left), len(right)), np.float32)
    for k in range(first, first + TILE_PAIRS):
        for half, term in enumerate((k, k + pairs)):
            sums[half] = (sums[half] + left[:, term, None] * right[None, :, term]).astype(np.float32)
    return sums[0] + sums[1]

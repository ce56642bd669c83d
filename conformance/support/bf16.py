"""Products of bfloat16 pairs in NumPy, bit for bit as the kernels compute them: order, rounding, denormals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
import tvm
from torch import nn
from tvm import relax

from conformance.support.kernels import machine_of
from harness.core.outcome import VerdictKind
from harness.core.precision import PRECISIONS
from harness.lowering.route import Lowered
from harness.parity.autocast import half_reference
from harness.parity.oracle import oracle
from harness.parity.verdict import judge
from harness.schedules.common.kernel import chunk_length

SMALLEST = 2.0**-126
"""The smallest positive normal number, of fp32 and of bfloat16."""


def linear(x: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """x · weightᵀ, fp32 [..., k] by bfloat16 [n, k], as `harness.lowering.precision` writes a linear layer."""
    return relax.op.matmul(relax.op.astype(x, "bfloat16"), relax.op.permute_dims(weight), out_dtype="float32")


def rounded(array: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties to even."""
    return array.astype(ml_dtypes.bfloat16)


def flushed(array: np.ndarray) -> np.ndarray:
    """Zero, of the same sign, for each denormal number."""
    return np.where(np.abs(array) < SMALLEST, np.copysign(array.dtype.type(0), array), array)


@dataclass(frozen=True)
class Processor:
    """What differs between processors.

    Attributes:
        flushes: Whether denormal numbers, operands and results, are zero, as for `vdpbf16ps`.
        fuses: Whether a product is not rounded by itself, which only shows where it is beyond fp32's range.
    """

    flushes: bool = False
    fuses: bool = True


def multiply_add(sums: np.ndarray, left: np.ndarray, right: np.ndarray, processor: Processor) -> np.ndarray:
    """sums + left · right, rounded once to fp32.

    A product of bfloat16 has 16 bits and a sum 24, so that a float64 holds what decides how fp32 rounds.

    Args:
        sums: fp32.
        left: bfloat16, broadcast to the sums.
        right: The same.
        processor: The one that computes it.
    """
    exact = [array.astype(np.float64) for array in (sums, left, right)]
    if processor.flushes:
        exact = [flushed(array) for array in exact]
    with np.errstate(invalid="ignore", over="ignore"):
        products = exact[1] * exact[2]
        products = products if processor.fuses else products.astype(np.float32)
        result = (exact[0] + products).astype(np.float32)
    return flushed(result) if processor.flushes else result


def product(x: np.ndarray, weight: np.ndarray, processor: Processor) -> np.ndarray:
    """What the kernels make of `linear` of matrices [m, k] and [n, k]: chunks of pairs, then the sum of the chunks."""
    left, right = rounded(x)[:, None, :], weight[None]
    pairs = x.shape[1] // 2
    chunk = chunk_length(pairs)
    totals = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for first in range(0, pairs, chunk):
        sums = np.zeros_like(totals)
        for k in range(first, min(first + chunk, pairs)):
            for term in (k + pairs, k):
                sums = multiply_add(sums, left[..., term], right[..., term], processor)
        with np.errstate(invalid="ignore", over="ignore"):
            totals = totals + sums
    return totals


def hold_to_upstream(
    block: nn.Module,
    made: Lowered,
    module: tvm.IRModule,
    args: tuple[torch.Tensor, ...],
    names: Sequence[str],
    target: tvm.target.Target,
) -> None:
    """Holds a module in bf16, as the pipeline left it, to less error than upstream has under autocast."""
    machine = machine_of(module, target)
    weights = list(machine["main_transform_params"]([tvm.runtime.tensor(a) for a in made.parameters().values()]))
    outputs = machine["main"](*(tvm.runtime.tensor(arg.numpy()) for arg in args), *weights)
    actual = dict(zip(names, (output.numpy() for output in outputs), strict=True))
    reference = half_reference(block, args, names, PRECISIONS["bf16"])
    verdicts = judge(actual, reference, oracle(block, args, names), by_oracle=True)
    assert {verdict.kind for verdict in verdicts} == {VerdictKind.ORACLE}, verdicts
    assert max(verdict.r_rms for verdict in verdicts) < 1.0, verdicts

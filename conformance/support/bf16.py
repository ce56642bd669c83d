"""Computes products of bfloat16 pairs in NumPy, bit for bit as the kernels do: order, rounding, denormals."""

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
from harness.compiler.lowering.route import Lowered
from harness.compiler.schedules.common.kernel import chunk_length
from harness.compiler.schedules.cpu.microkernels import vpmaddwd
from harness.compiler.schedules.cpu.microkernels.bfmmla import LEAST_ROWS, TERMS
from harness.core.outcome import VerdictKind
from harness.core.precision import PRECISIONS
from harness.parity.autocast import half_reference
from harness.parity.oracle import oracle
from harness.parity.references import Reference
from harness.parity.verdict import judge

SMALLEST = 2.0**-126
"""The smallest positive normal number, of fp32 and of bfloat16."""


def linear(x: relax.Expr, weight: relax.Expr) -> relax.Expr:
    """Computes x · weightᵀ, fp32 [..., k] by bfloat16 [n, k], as `harness.compiler.lowering.precision` does."""
    return relax.op.matmul(relax.op.astype(x, "bfloat16"), relax.op.permute_dims(weight), out_dtype="float32")


def rounded(array: np.ndarray) -> np.ndarray:
    """Returns the nearest bfloat16, ties to even."""
    return array.astype(ml_dtypes.bfloat16)


def flushed(array: np.ndarray) -> np.ndarray:
    """Returns zero, of the same sign, for each denormal number."""
    return np.where(np.abs(array) < SMALLEST, np.copysign(array.dtype.type(0), array), array)


@dataclass(frozen=True)
class Processor:
    """The differences between processors.

    Attributes:
        flushes: Whether denormal numbers, operands and results, are zero, as for `vdpbf16ps`.
        fuses: Whether a product is not rounded by itself, which only shows where it is beyond fp32's range.
        odd: Whether both products of a pair are added first, and sums are rounded to odd, as by `bfdot`; four terms are
            two pairs in turn where there are as many, as for `bfmmla`.
        integers: Whether a linear layer of several rows multiplies integers that share scales, as by `vpmaddwd`.
    """

    flushes: bool = False
    fuses: bool = True
    odd: bool = False
    integers: bool = False


ARM = Processor(flushes=True, fuses=False, odd=True)
"""One with FEAT_BF16."""


def multiply_add(sums: np.ndarray, left: np.ndarray, right: np.ndarray, processor: Processor) -> np.ndarray:
    """Computes sums + left · right, rounded once to fp32.

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


def added_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Computes a + b of fp32 numbers as BFDotAdd of Arm's manual: cut off, with an odd last bit if inexact; flushed.

    A float64 sum and its error (Knuth's TwoSum) tell on which side of an fp32 number the exact sum is.
    """
    a, b = (flushed(array).astype(np.float64) for array in (a, b))
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
        nearest = total.astype(np.float32)
        wide = nearest.astype(np.float64)
    beyond = (np.abs(wide) > np.abs(total)) | ((wide == total) & (np.sign(error) == -np.sign(total)) & (error != 0))
    inexact = ((wide != total) | (error != 0)) & (np.abs(total) < 2.0**128)
    cut = np.where(beyond & inexact, np.nextafter(nearest, np.float32(0)), nearest)
    odd = (cut.view(np.uint32) | 1).view(np.float32)
    return flushed(np.where(inexact & np.isfinite(cut), odd, cut))


def pair_added(sums: np.ndarray, left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> np.ndarray:
    """Computes sums + the products of two bfloat16 terms, as `bfdot` adds them; terms are broadcast to the sums."""
    terms = [[flushed(term.astype(np.float32)) for term in side] for side in (left, right)]
    with np.errstate(invalid="ignore", over="ignore"):
        products = [a * b for a, b in zip(*terms, strict=True)]
    return added_to_odd(sums, added_to_odd(*map(flushed, products)))


def product(
    x: np.ndarray, weight: np.ndarray, processor: Processor, channels: int = 0, *, panels: bool = True
) -> np.ndarray:
    """Computes the kernels' product of matrices [m, k] and [n, k]: chunks of pairs, then the sum of the chunks.

    Args:
        x: The activations.
        weight: The weights, in bfloat16.
        processor: The one that computes it.
        channels: Of a convolution, whose left operand are the weights; 0 for a linear layer.
        panels: Whether the left operand can be packed along its rows, as whole panels are.
    """
    left, right = rounded(x)[:, None, :], weight[None]
    rows, terms = (len(weight), channels) if channels else x.shape
    if panels and processor.odd and rows >= LEAST_ROWS and terms % TERMS == 0:
        return _product_of_fours(left, right)
    if panels and processor.integers and rows >= vpmaddwd.LEAST_ROWS and not channels:
        return _product_of_integers(*(side.astype(np.float32) for side in (left[:, 0], right[0])))
    pairs = x.shape[1] // 2
    chunk = chunk_length(pairs)
    totals = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for first in range(0, pairs, chunk):
        sums = np.zeros_like(totals)
        for k in range(first, min(first + chunk, pairs)):
            if processor.odd:
                sums = pair_added(sums, *([side[..., k], side[..., k + pairs]] for side in (left, right)))
                continue
            for term in (k + pairs, k):
                sums = multiply_add(sums, left[..., term], right[..., term], processor)
        with np.errstate(invalid="ignore", over="ignore"):
            totals = totals + sums
    return totals


def _product_of_fours(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Computes `bfmmla`'s product of rows, [m, 1, k], and columns, [1, n, k]."""
    quarter = left.shape[-1] // TERMS
    sums = np.zeros(np.broadcast_shapes(left.shape, right.shape)[:2], np.float32)
    for k in range(quarter):
        for first in (k, k + 2 * quarter):
            sums = pair_added(sums, *([side[..., first], side[..., first + quarter]] for side in (left, right)))
    return sums


def _product_of_integers(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Computes `vpmaddwd`'s product of rows, [m, k], and columns, [n, k], integers with a scale in each chunk."""
    pairs = left.shape[1] // 2
    chunk = max(length for length in range(1, vpmaddwd.LONGEST + 1) if pairs % length == 0)
    largest = int(np.sqrt((2**31 - 1) // (2 * chunk)))
    sums = np.zeros((len(left), len(right)), np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, pairs, chunk):
            terms = np.r_[first : first + chunk, pairs + first : pairs + first + chunk]
            (rows, row_scales), (columns, column_scales) = (_scaled(side[:, terms], largest) for side in (left, right))
            exact = rows @ columns.T
            assert np.abs(exact).max() < 2**31
            by_column = exact.astype(np.float32) * column_scales
            # One rounding, of a product that float64 holds.
            sums = (by_column.astype(np.float64) * row_scales[:, None] + sums).astype(np.float32)
    return sums


def _scaled(terms: np.ndarray, largest: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest integers of rows of terms, in float64, and the factor of each row."""
    most = np.maximum(np.abs(terms).max(axis=1), np.float32(vpmaddwd.LEAST))
    factor = ((np.float32(largest) / most).view(np.uint32) & np.uint32(0xFFFFFF00)).view(np.float32)
    finite = np.isfinite(most)
    scales = np.where(finite, np.float32(1.0) / factor, np.float32(np.nan))
    return np.where(finite[:, None], np.rint(terms * factor[:, None]), 0).astype(np.float64), scales


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
    verdicts = judge(actual, Reference.from_run(reference, oracle(block, args, names)), by_oracle=True)
    assert {verdict.kind for verdict in verdicts} == {VerdictKind.ORACLE}, verdicts
    assert max(verdict.r_rms for verdict in verdicts) < 1.0, verdicts

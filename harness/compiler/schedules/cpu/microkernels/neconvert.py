"""Multiplies bfloat16 pairs in fp32 on x86 processors that load bfloat16 numbers as fp32, with AVX-NE-CONVERT.

One instruction makes fp32 numbers of the first terms of eight pairs in memory (`vcvtneebf162ps`), another one of the
second terms (`vcvtneobf162ps`), where other processors load the pairs, shift and mask (`bf16.shifts`). Both are exact
and keep denormal numbers (Intel's manual of instruction set extensions, VCVTNEEBF162PS), so that results are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.compiler import tir as T
from harness.compiler.schedules.cpu.microkernels import bf16
from harness.compiler.schedules.cpu.tile import VectorUnit, choose_tile

_UNIT = VectorUnit(lanes=8, registers=16)
_SHAPES = ((4, 2), (1, 4), (10, 1))
"""Rows and vectors of tiles: sums, both halves of a row of B and two numbers of A, where LLVM repeats a step, too."""


def _multiply_add(sums: T.Expr, numbers: Sequence[T.Expr], right: T.TensorLoad) -> T.Expr:
    *row, columns = right.indices
    assert isinstance(columns, T.Ramp)
    place = T.address_of(right.source[(*row, columns.base)])
    terms = [T.call_llvm_intrin("float32x8", f"llvm.x86.vcvtne{half}bf162ps256", place) for half in "eo"]
    return bf16.multiply_add_pairs(sums, numbers, terms)


CONVERSIONS = replace(
    bf16.shifts(_UNIT),
    name="bf16_vcvtne",
    step=bf16.in_vectors(_multiply_add),
    choose_tile=lambda unit, rows, columns: choose_tile(unit, rows, columns, _SHAPES),
)
"""Linear layers of one row, which are too few for whole panels, and others that panels do not take."""

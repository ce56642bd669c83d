"""Multiplies bfloat16 pairs in fp32 on x86 processors that load bfloat16 numbers as fp32, with AVX-NE-CONVERT.

One instruction makes fp32 numbers of the first terms of eight pairs in memory (`vcvtneebf162ps`), another one of the
second terms (`vcvtneobf162ps`), where other processors load the pairs, shift and mask (`bf16.shifts`). Both are exact
and keep denormal numbers (Intel's manual of instruction set extensions, VCVTNEEBF162PS), so that results are the same.
"""

from __future__ import annotations

from dataclasses import replace

from harness.compiler.schedules.cpu.microkernels import bf16
from harness.compiler.schedules.cpu.tile import VectorUnit, choose_tile

_UNIT = VectorUnit(lanes=8, registers=16)
_FLOATS = f"<{_UNIT.lanes} x float>"
_EVEN, _ODD = (f"llvm.x86.vcvtne{half}bf162ps{32 * _UNIT.lanes}" for half in "eo")
_SHAPES = ((4, 2), (1, 4), (10, 1))
"""Rows and vectors of tiles: sums, both halves of a row of B and two numbers of A, where LLVM repeats a step, too."""
_NAME = "multiply_add_loaded_pairs"
_SOURCE = f"""
declare {_FLOATS} @{_EVEN}(ptr)
declare {_FLOATS} @{_ODD}(ptr)

define linkonce_odr {_FLOATS} @{_NAME}({_FLOATS} %sums, {_FLOATS} %low, {_FLOATS} %high, ptr %right) alwaysinline {{
  %right.high = call {_FLOATS} @{_ODD}(ptr %right)
  %right.low = call {_FLOATS} @{_EVEN}(ptr %right)
  %first = fmul contract {_FLOATS} %high, %right.high
  %sum = fadd contract {_FLOATS} %sums, %first
  %second = fmul contract {_FLOATS} %low, %right.low
  %result = fadd contract {_FLOATS} %sum, %second
  ret {_FLOATS} %result
}}
"""


CONVERSIONS = replace(
    bf16.shifts(_UNIT),
    name="bf16_vcvtne",
    step=bf16.calls(_NAME, by_address=True),
    source=_SOURCE,
    choose_tile=lambda unit, rows, columns: choose_tile(unit, rows, columns, _SHAPES),
)
"""Linear layers of one row, which are too few for whole panels, and others that panels do not take."""

"""The matrix unit of x86 without one: its functions in LLVM IR that any processor runs, and its sums in NumPy."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, tirx

from conformance.support.bf16 import rounded
from harness.runtime.cpu import MATRIX_UNIT
from harness.schedules.cpu.amx import PAIRS
from harness.schedules.cpu.bf16x6 import LARGE, PARTS, SMALL

_DEFINED = re.compile(r"define linkonce_odr i32 @(\w+?)(?:_(\d+)x(\d+))?\(")
"""Name of a function, and rows and columns of the panels that it multiplies."""


def target_with_tiles(cpu: str) -> tvm.target.Target:
    """An x86 processor of that name, with a matrix unit."""
    mattr = [f"+{feature}" for feature in MATRIX_UNIT]
    return tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mtriple": "x86_64-linux-gnu", "mattr": mattr})


def without_unit(module: tvm.IRModule) -> tvm.IRModule:
    """The module with functions of the same names that do in vectors what the unit does, but for denormal numbers."""

    def replaced(text: ir.StringImm) -> ir.StringImm:
        defined = _DEFINED.findall(str(text.value)) if "tdpbf16ps" in str(text.value) else []
        functions = [_replacement(name, int(rows or 0), int(columns or 0)) for name, rows, columns in defined]
        return ir.StringImm("\n".join([_DECLARED, *functions])) if functions else text

    made = module.clone()
    for variable, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            made[variable] = function.with_body(tvm_ffi.structural_map(function.body, (ir.StringImm, replaced)))
    return made


_DECLARED = "declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)"


def _replacement(name: str, rows: int, columns: int) -> str:
    if not rows:
        return f"define linkonce_odr i32 @{name}() {{\n  ret i32 0\n}}\n"
    return (_function_of_parts if "x6" in name else _function)(name, rows, columns)


def _function_of_parts(name: str, rows: int, columns: int) -> str:
    """Adds products of parts one after the other, those of a whole chunk that are small first."""
    width, one = 4 * columns, "one_product_in_tiles"
    vectors = rows * columns // 16
    return f"""
{_function(one, rows, columns)}
define linkonce_odr i32 @{name}_{rows}x{columns}(ptr %sums, ptr %left, ptr %right, i64 %row, i32 %steps, i32 %added) {{
entry:
  %chunk = alloca [{vectors} x <16 x float>], align 64
  store [{vectors} x <16 x float>] zeroinitializer, ptr %chunk, align 64
  %count = zext i32 %steps to i64
  %new = icmp eq i32 %added, 0
  br label %small
{_loop_of_parts("small", "entry", "middle", SMALL, f"{one}_{rows}x{columns}", width)}
middle:
  br label %large
{_loop_of_parts("large", "middle", "between", LARGE, f"{one}_{rows}x{columns}", width)}
between:
  br label %add
add:
  %v = phi i32 [ 0, %between ], [ %v.next, %add ]
  %here = getelementptr <16 x float>, ptr %chunk, i32 %v
  %there = getelementptr <16 x float>, ptr %sums, i32 %v
  %one = load <16 x float>, ptr %here, align 4
  %other = load <16 x float>, ptr %there, align 4
  %both = fadd <16 x float> %other, %one
  %result = select i1 %new, <16 x float> %one, <16 x float> %both
  store <16 x float> %result, ptr %there, align 4
  %v.next = add i32 %v, 1
  %v.more = icmp slt i32 %v.next, {vectors}
  br i1 %v.more, label %add, label %end
end:
  ret i32 0
}}
"""


def _loop_of_parts(
    name: str, before: str, after: str, products: Sequence[tuple[int, int]], one: str, width: int
) -> str:
    calls = []
    for n, (left, right) in enumerate(products):
        at = f"{name}.{n}"
        calls.append(
            f"""
  %left.part.{at} = mul i64 %count, {left * PAIRS * 4}
  %left.at.{at} = add i64 %left.step.{name}, %left.part.{at}
  %l.{at} = getelementptr i8, ptr %left, i64 %left.at.{at}
  %right.part.{at} = mul i64 %count, {right * PAIRS * width}
  %right.at.{at} = add i64 %right.step.{name}, %right.part.{at}
  %r.{at} = getelementptr i8, ptr %right, i64 %right.at.{at}
  %called.{at} = call i32 @{one}(ptr %chunk, ptr %l.{at}, ptr %r.{at}, i64 %row, i32 1, i32 1)"""
        )
    return f"""
{name}:
  %s.{name} = phi i32 [ 0, %{before} ], [ %next.{name}, %{name} ]
  %at.{name} = zext i32 %s.{name} to i64
  %left.step.{name} = mul i64 %at.{name}, {PAIRS * 4}
  %right.step.{name} = mul i64 %at.{name}, {PAIRS * width}
{"".join(calls)}
  %next.{name} = add i32 %s.{name}, 1
  %more.{name} = icmp slt i32 %next.{name}, %steps
  br i1 %more.{name}, label %{name}, label %{after}"""


def _function(name: str, rows: int, columns: int) -> str:
    width = 4 * columns
    vector = "<16 x i32>"
    spread = f"shufflevector {vector}"
    zeros = f"{vector} zeroinitializer"
    return f"""
define linkonce_odr i32 @{name}_{rows}x{columns}(ptr %sums, ptr %left, ptr %right, i64 %row, i32 %steps, i32 %added) {{
entry:
  %new = icmp eq i32 %added, 0
  %count = sext i32 %steps to i64
  br label %tile
tile:
  %t = phi i64 [ 0, %entry ], [ %t.next, %tile.end ]
  %m = udiv i64 %t, {columns // 16}
  %c = urem i64 %t, {columns // 16}
  %sum.row = mul i64 %m, {width}
  %column = mul i64 %c, 64
  %sum.at = add i64 %sum.row, %column
  %sum.place = getelementptr i8, ptr %sums, i64 %sum.at
  %there = load <16 x float>, ptr %sum.place, align 4
  %before = select i1 %new, <16 x float> zeroinitializer, <16 x float> %there
  %left.at = mul i64 %m, %row
  %left.row = getelementptr i8, ptr %left, i64 %left.at
  %right.column = getelementptr i8, ptr %right, i64 %column
  br label %step
step:
  %s = phi i64 [ 0, %tile ], [ %s.next, %step.end ]
  %sum = phi <16 x float> [ %before, %tile ], [ %sum.next, %step.end ]
  br label %pair
pair:
  %k = phi i64 [ 0, %step ], [ %k.next, %pair ]
  %first = phi <16 x float> [ zeroinitializer, %step ], [ %first.next, %pair ]
  %second = phi <16 x float> [ zeroinitializer, %step ], [ %second.next, %pair ]
  %begin = mul i64 %s, {PAIRS}
  %at = add i64 %begin, %k
  %left.place = getelementptr i32, ptr %left.row, i64 %at
  %a = load i32, ptr %left.place, align 4
  %right.at = mul i64 %at, {width}
  %right.place = getelementptr i8, ptr %right.column, i64 %right.at
  %b = load {vector}, ptr %right.place, align 4
  %a.one = insertelement {vector} poison, i32 %a, i32 0
  %a.all = {spread} %a.one, {vector} poison, {zeros}
  %sixteen.one = insertelement {vector} poison, i32 16, i32 0
  %sixteen = {spread} %sixteen.one, {vector} poison, {zeros}
  %mask.one = insertelement {vector} poison, i32 -65536, i32 0
  %mask = {spread} %mask.one, {vector} poison, {zeros}
  %a.low = shl {vector} %a.all, %sixteen
  %b.low = shl {vector} %b, %sixteen
  %a.high = and {vector} %a.all, %mask
  %b.high = and {vector} %b, %mask
  %a1 = bitcast {vector} %a.low to <16 x float>
  %b1 = bitcast {vector} %b.low to <16 x float>
  %a2 = bitcast {vector} %a.high to <16 x float>
  %b2 = bitcast {vector} %b.high to <16 x float>
  %first.next = call <16 x float> @llvm.fma.v16f32(<16 x float> %a1, <16 x float> %b1, <16 x float> %first)
  %second.next = call <16 x float> @llvm.fma.v16f32(<16 x float> %a2, <16 x float> %b2, <16 x float> %second)
  %k.next = add i64 %k, 1
  %k.more = icmp ult i64 %k.next, {PAIRS}
  br i1 %k.more, label %pair, label %step.end
step.end:
  %both = fadd <16 x float> %first.next, %second.next
  %sum.next = fadd <16 x float> %sum, %both
  %s.next = add i64 %s, 1
  %s.more = icmp ult i64 %s.next, %count
  br i1 %s.more, label %step, label %tile.end
tile.end:
  store <16 x float> %sum.next, ptr %sum.place, align 4
  %t.next = add i64 %t, 1
  %t.more = icmp ult i64 %t.next, {rows * columns // 16}
  br i1 %t.more, label %tile, label %end
end:
  ret i32 0
}}
"""


def product_in_tiles(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What the unit makes of matrices [m, k] and [n, k] without denormal numbers; both are rounded to bfloat16."""
    sums = np.zeros((len(x), len(weight)), np.float32)
    left, right = (rounded(array).astype(np.float64) for array in (x, weight))
    for step in range(0, x.shape[1] // 2, PAIRS):
        sums = sums + _in_tile(left, right, step)
    return sums


def product_of_parts(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """What the unit makes of fp32 matrices [m, k] and [n, k] in six products of parts, none of which is denormal."""
    lefts, rights = ([part.astype(np.float64) for part in parts_of(array)] for array in (x, weight))
    pairs = x.shape[1] // 2
    chunk = PAIRS * next(steps for steps in (4, 3, 2, 1) if pairs % (PAIRS * steps) == 0)
    totals = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, pairs, chunk):
        sums = np.zeros_like(totals)
        for products in (SMALL, LARGE):
            for step in range(first, first + chunk, PAIRS):
                for left, right in products:
                    sums = sums + _in_tile(lefts[left], rights[right], step)
        totals = totals + sums
    return totals


def parts_of(array: np.ndarray) -> list[np.ndarray]:
    """The parts of fp32 numbers, in bfloat16, the largest first."""
    found = []
    for _ in range(PARTS):
        found.append(rounded(array))
        array = array - found[-1].astype(np.float32)
    return found


def _in_tile(left: np.ndarray, right: np.ndarray, first: int) -> np.ndarray:
    """What TDPBF16PS of Intel's manual adds to a tile, of matrices [m, k] and [n, k] of bfloat16 in float64.

    A pair is terms k and k + depth / 2. Products of bfloat16 have 16 bits, so that float64 holds what decides how a
    sum of one and of an fp32 number is rounded.
    """
    pairs = left.shape[1] // 2
    sums = np.zeros((2, len(left), len(right)), np.float32)
    for k in range(first, first + PAIRS):
        for half, term in enumerate((k, k + pairs)):
            sums[half] = (sums[half] + left[:, term, None] * right[None, :, term]).astype(np.float32)
    return sums[0] + sums[1]

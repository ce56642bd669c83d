"""Emulates instructions of x86 that multiply pairs, as LLVM IR for any CPU, so that kernels with them run anywhere.

A lowered module of a newer CPU keeps its loops, panels and order of additions; its code is that of AVX2, and what takes
the place of an instruction rounds as Intel's manual says that the instruction does.
"""

from __future__ import annotations

import json

import tvm
import tvm_ffi
from tvm import ir
from tvm.target import codegen

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import Argument, prim_func
from harness.compiler.targets.compiling import platform_of
from harness.compiler.targets.llvm import required_cpu
from harness.runtime.cpu import MATRIX_UNIT, this_platform
from harness.runtime.loading import cpu_problem

AVX2 = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "mtriple": "x86_64-linux-gnu"})

_LANES = 16
_FLOATS, _INTEGERS, _HALVES, _SHORTS = (
    f"<{count} x {ty}>" for count, ty in ((16, "float"), (16, "i32"), (32, "bfloat"), (32, "i16"))
)


def _splat(bits: int) -> str:
    return f"<{', '.join([f'i32 {bits}'] * _LANES)}>"


_DOT_PRODUCT = f"""
declare {_FLOATS} @llvm.fma.v{_LANES}f32({_FLOATS}, {_FLOATS}, {_FLOATS})

define linkonce_odr {_FLOATS} @emulated_flush({_INTEGERS} %bits) alwaysinline {{
  %exponent = and {_INTEGERS} %bits, {_splat(0x7F800000)}
  %denormal = icmp eq {_INTEGERS} %exponent, zeroinitializer
  %zero = and {_INTEGERS} %bits, {_splat(-0x80000000)}
  %kept = select <{_LANES} x i1> %denormal, {_INTEGERS} %zero, {_INTEGERS} %bits
  %result = bitcast {_INTEGERS} %kept to {_FLOATS}
  ret {_FLOATS} %result
}}

define linkonce_odr {_FLOATS} @emulated_step({_FLOATS} %sums, {_INTEGERS} %left, {_INTEGERS} %right) alwaysinline {{
  %a = call {_FLOATS} @emulated_flush({_INTEGERS} %left)
  %b = call {_FLOATS} @emulated_flush({_INTEGERS} %right)
  %sum = call {_FLOATS} @llvm.fma.v{_LANES}f32({_FLOATS} %a, {_FLOATS} %b, {_FLOATS} %sums)
  %bits = bitcast {_FLOATS} %sum to {_INTEGERS}
  %result = call {_FLOATS} @emulated_flush({_INTEGERS} %bits)
  ret {_FLOATS} %result
}}

define linkonce_odr {_FLOATS} @emulated_dpbf16ps({_FLOATS} %sums, {_HALVES} %left, {_HALVES} %right) alwaysinline {{
  %a = bitcast {_HALVES} %left to {_INTEGERS}
  %b = bitcast {_HALVES} %right to {_INTEGERS}
  %a.high = and {_INTEGERS} %a, {_splat(-0x10000)}
  %b.high = and {_INTEGERS} %b, {_splat(-0x10000)}
  %a.low = shl {_INTEGERS} %a, {_splat(16)}
  %b.low = shl {_INTEGERS} %b, {_splat(16)}
  %bits = bitcast {_FLOATS} %sums to {_INTEGERS}
  %flushed = call {_FLOATS} @emulated_flush({_INTEGERS} %bits)
  %first = call {_FLOATS} @emulated_step({_FLOATS} %flushed, {_INTEGERS} %a.high, {_INTEGERS} %b.high)
  %result = call {_FLOATS} @emulated_step({_FLOATS} %first, {_INTEGERS} %a.low, {_INTEGERS} %b.low)
  ret {_FLOATS} %result
}}
"""
"""VDPBF16PS: the high products first, each added with one rounding; denormal numbers, given or made, are zero."""

_INTEGER_PRODUCT = f"""
define linkonce_odr {_INTEGERS} @emulated_pmaddwd({_SHORTS} %left, {_SHORTS} %right) alwaysinline {{
  %a = bitcast {_SHORTS} %left to {_INTEGERS}
  %b = bitcast {_SHORTS} %right to {_INTEGERS}
  %a.shifted = shl {_INTEGERS} %a, {_splat(16)}
  %b.shifted = shl {_INTEGERS} %b, {_splat(16)}
  %a.low = ashr {_INTEGERS} %a.shifted, {_splat(16)}
  %b.low = ashr {_INTEGERS} %b.shifted, {_splat(16)}
  %a.high = ashr {_INTEGERS} %a, {_splat(16)}
  %b.high = ashr {_INTEGERS} %b, {_splat(16)}
  %low = mul {_INTEGERS} %a.low, %b.low
  %high = mul {_INTEGERS} %a.high, %b.high
  %result = add {_INTEGERS} %low, %high
  ret {_INTEGERS} %result
}}
"""
"""VPMADDWD: the sum of two products of signed integers."""

_FLOATS_IN_YMM = "<8 x float>"


def _conversion(half: str, shift: str) -> str:
    return f"""
define linkonce_odr {_FLOATS_IN_YMM} @emulated_{half}(ptr %pairs) alwaysinline {{
  %bits = load <8 x i32>, ptr %pairs, align 1
  %upper = {shift} <8 x i32> %bits, <{", ".join(["i32 " + ("16" if shift == "shl" else "-65536")] * 8)}>
  %result = bitcast <8 x i32> %upper to {_FLOATS_IN_YMM}
  ret {_FLOATS_IN_YMM} %result
}}
"""


_DECLARED = f"declare {_FLOATS} @llvm.x86.avx512bf16.dpbf16ps.512({_FLOATS}, {_HALVES}, {_HALVES})"
"""The declaration of the dot product by a kernel, whose function of LLVM IR calls it."""
_CALLED = {
    "llvm.x86.avx512.pmaddw.d.512": "emulated_pmaddwd",
    "llvm.x86.vcvtneebf162ps256": "emulated_even",
    "llvm.x86.vcvtneobf162ps256": "emulated_odd",
}
"""LLVM's intrinsics that kernels call themselves, and what takes their place."""
_DEFINITIONS = _INTEGER_PRODUCT + _conversion("even", "shl") + _conversion("odd", "and")


def emulates(target: tvm.target.Target) -> bool:
    """Returns whether AVX2 can emulate an x86-64 target's instructions; the matrix unit has an emulation of its own."""
    has_unit = any(f"+{feature}" in map(str, target.attrs.get("mattr", ())) for feature in MATRIX_UNIT)
    here = platform_of(target) == this_platform() and cpu_problem(*required_cpu(AVX2)) is None
    return here and this_platform()[1] == "x86_64" and not has_unit


def emulated(module: tvm.IRModule) -> tvm.IRModule:
    """Replaces instructions in loops by calls of functions that AVX2 can compute."""
    text = str(tvm.ir.save_json(module)).replace(_DECLARED, json.dumps(_DOT_PRODUCT)[1:-1])
    text = text.replace("@llvm.x86.avx512bf16.dpbf16ps.512(", "@emulated_dpbf16ps(")
    assert "dpbf16ps.512" not in text, "the declaration is that of another spelling"
    module = tvm.ir.load_json(text)

    def replace(call: ir.Call) -> ir.Call:
        if getattr(call.op, "name", "") != "tirx.call_llvm_intrin":
            return call
        name = _CALLED.get(codegen.llvm_get_intrinsic_name(int(call.args[0])))
        return call if name is None else T.call_extern(str(call.ty), name, *call.args[1:])

    def define(result: T.Buffer) -> None:
        with T.attr(T.const(0, "int32"), "pragma_import_llvm", _DEFINITIONS):
            T.buffer_store(result, T.const(0.0, "float32"), [0])

    for variable, function in module.functions_items():
        if isinstance(function, T.PrimFunc):
            module[variable] = function.with_body(tvm_ffi.structural_map(function.body, (ir.Call, replace)))
    name = "emulated_instructions"
    module[name] = prim_func(name, [Argument("result", (1,))], define).with_attr("global_symbol", name)
    return module

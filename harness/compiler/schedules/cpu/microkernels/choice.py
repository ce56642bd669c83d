"""Chooses the micro-kernels of a target, and the one of a product: the only module that asks for instructions."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm.target import codegen

from harness.compiler.schedules.cpu.microkernels import bf16
from harness.compiler.schedules.cpu.microkernels.amx import AMX
from harness.compiler.schedules.cpu.microkernels.bfmmla import BFMMLA
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.microkernels.neconvert import CONVERSIONS
from harness.compiler.schedules.cpu.microkernels.vpmaddwd import scaled_integers
from harness.compiler.schedules.cpu.tile import VectorUnit, vector_unit
from harness.runtime.cpu import MATRIX_UNIT, has_integer_pairs

_DOT_PRODUCTS = {
    VectorUnit(lanes=16, registers=32): ("avx512bf16", "llvm.x86.avx512bf16.dpbf16ps.512"),
    VectorUnit(lanes=4, registers=32): ("bf16", "llvm.aarch64.neon.bfdot.v4f32.v8bf16"),
}
"""LLVM's feature and intrinsic of an instruction for pairs of bfloat16, by vector registers, which tell NEON from SSE.
"""


def micro_kernels(target: tvm.target.Target) -> tuple[MicroKernel, ...]:
    """Returns the micro-kernels of a CPU, the fastest first; the last one, of fp32, takes every product.

    Code for the matrix unit is for targets whose attributes name both of its features: a processor's name is not
    enough, because hypervisors and containers hide the unit of one that has it.
    """

    def has(feature: str) -> bool:
        return bool(codegen.llvm_cpu_has_features(feature, target))

    unit = vector_unit(target)
    feature, intrinsic = _DOT_PRODUCTS.get(unit, ("", ""))
    dot_products = bool(feature) and has(feature)
    kernels: list[MicroKernel] = []
    if {f"+{name}" for name in MATRIX_UNIT} <= {str(attribute) for attribute in target.attrs.get("mattr", ())}:
        kernels.append(AMX)
    elif dot_products and unit.lanes == 4:
        kernels.append(BFMMLA)
    elif not dot_products and has_integer_pairs(has):
        kernels.append(scaled_integers(unit.lanes))
    if dot_products:
        kernels.append(bf16.dot_products(unit.lanes, intrinsic))
    if unit.lanes == 8 and has("avxneconvert"):
        kernels.append(CONVERSIONS)
    return (*kernels, bf16.shifts(unit), FP32)


def rounding_kernels(target: tvm.target.Target) -> tuple[MicroKernel, ...]:
    """Returns the micro-kernels of a CPU that multiply rounded operands faster than fp32."""
    return tuple(kernel for kernel in micro_kernels(target) if kernel is not FP32 and not kernel.widens)


def choose(
    kernels: Sequence[MicroKernel],
    rows: int,
    terms: int,
    repeats: int = 1,
    *,
    row_major: bool = True,
    layer: bool = False,
) -> MicroKernel:
    """Returns the fastest micro-kernel of a product whose operands may be rounded.

    Args:
        kernels: The micro-kernels of the target, the fastest first.
        rows: Rows of the product.
        terms: Terms among which the terms of an element are chosen.
        repeats: Number of times that a sum has these terms: pixels of a convolution's kernel.
        row_major: Whether panels of A can lie row by row.
        layer: Whether it is a linear layer with bfloat16 weights.
    """
    return next(
        kernel
        for kernel in kernels
        if kernel.takes(rows, terms, repeats)
        and (row_major or not kernel.a.row_major)
        and (layer or not kernel.layers_only)
    )

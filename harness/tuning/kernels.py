"""Lists the tunable kernels of a component, and compiles each as a program of its own.

A kernel is rebuilt from its workload alone, as a Relax module with one operator and inputs from a seed, so that
measuring it needs neither SAM 3 nor its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from harness.compiler.schedules import Schedule
from harness.compiler.schedules.cpu.bf16 import BF16, allow_bf16
from harness.compiler.schedules.cpu.rewrite import workloads
from harness.compiler.schedules.cpu.schedule import Attention, Convolution, Product, TransposedConvolution, Workload
from harness.compiler.schedules.cpu.widening import lower_bf16
from harness.compiler.targets import HOST, TARGETS
from harness.compiler.targets.compiling import LIBRARY_SUFFIX, build_library, lower_module
from harness.core.budget import Groups
from harness.core.case import Case
from harness.core.files import temporary_folder
from harness.core.processors import Processors
from harness.core.program import Array
from harness.runtime.executable import TRANSFORM_PARAMETERS
from harness.runtime.loading import load_library

Run = Callable[[], Any]
"""Computes a kernel once and returns the result as a tensor of TVM."""


def count_workloads(
    case: Case, processors: Processors, float32: Groups, on_stage: Callable[[str], None]
) -> Counter[Workload]:
    """Counts the occurrences of each workload in a component; `harness.core.processes` calls this function.

    In a half precision, products that stay float32 are float32 workloads, and the others are workloads of the half type
    if a kernel has an instruction for it.
    """
    from harness.models.importing import imported_module

    module = lower_bf16(imported_module(case, on_stage, float32))
    return Counter(workloads(module, TARGETS[case.target].tvm_target(processors)))


@dataclass(frozen=True)
class Operator:
    """A workload as a single Relax operator.

    Attributes:
        inputs: Shape and dtype of each tensor that changes with every call.
        weights: Shape and dtype of each tensor that is known when the model is loaded.
        apply: Returns the operator's Relax expression for the tensors.
        terms: Number of products whose sum an element of the result is; 1 if it is a mean.
    """

    inputs: tuple[tuple[tuple[int, ...], str], ...]
    weights: tuple[tuple[tuple[int, ...], str], ...]
    apply: Callable[..., relax.Expr]
    terms: int = 1


def _weighted_operator(
    image: tuple[int, ...], weight: tuple[int, ...], at_load: bool, apply: Callable[..., relax.Expr], terms: int
) -> Operator:
    """Returns an operator of two float32 tensors, the second of which may be known when the model is loaded."""
    image_spec, weight_spec = (image, "float32"), (weight, "float32")
    return Operator(
        (image_spec,) if at_load else (image_spec, weight_spec), (weight_spec,) if at_load else (), apply, terms
    )


@singledispatch
def build_operator(workload: Workload) -> Operator:
    """Returns a workload as a single operator."""
    raise TypeError(f"{workload.key} is no operator")


@build_operator.register
def _product_operator(workload: Product) -> Operator:
    extents, matrices = workload.extents, workload.matrices
    shared = 1 < matrices < extents.batch
    batch = (extents.batch // matrices, matrices) if shared else (extents.batch,)
    weight_batch = (1, matrices) if shared else (matrices,)
    streams_left = workload.streaming == "left"
    operands = (extents.rows, extents.depth), (extents.depth, extents.columns)
    streaming, resident = operands if streams_left else operands[::-1]
    # As PyTorch stores the weights of a linear layer.
    resident = resident[::-1] if streams_left else resident
    streaming = streaming[::-1] if workload.transposed else streaming
    axes = [*range(len(batch)), len(batch) + 1, len(batch)]

    def apply(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        x = relax.op.permute_dims(x, axes) if workload.transposed else x
        return relax.op.matmul(x, relax.op.permute_dims(w, axes)) if streams_left else relax.op.matmul(w, x)

    return _weighted_operator((*batch, *streaming), (*weight_batch, *resident), workload.at_load, apply, extents.depth)


@build_operator.register
def _convolution_operator(workload: Convolution) -> Operator:
    window = workload.window
    # Padding after the image, as much as the result needs.
    end_padding = [
        max(0, (out - 1) * stride + (kernel - 1) * dilation + 1 - extent - begin_padding)
        for out, stride, kernel, dilation, extent, begin_padding in zip(
            window.result[2:], window.strides, window.kernel, window.dilation, window.image[2:], window.padding,
            strict=True,
        )
    ]  # fmt: skip

    def apply(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        padding = (*window.padding, *end_padding)
        options = {"strides": window.strides, "dilation": window.dilation, "groups": window.groups}
        return relax.op.nn.conv2d(x, w, padding=padding, **options)

    weight = (window.result[1], window.channels, *window.kernel)
    return _weighted_operator(window.image, weight, workload.at_load, apply, window.depth)


@build_operator.register
def _transposed_convolution_operator(workload: TransposedConvolution) -> Operator:
    def apply(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d_transpose(x, w, strides=workload.weight[2:])

    return _weighted_operator(workload.image, workload.weight, workload.at_load, apply, workload.weight[0])


@build_operator.register
def _attention_operator(workload: Attention) -> Operator:
    sizes = ((workload.queries, workload.channels), (workload.keys, workload.channels), (workload.keys, workload.width))
    inputs = [((workload.batch, length, workload.heads, channels), "float32") for length, channels in sizes]
    bias = [] if workload.bias is None else [(workload.bias_shape, workload.bias)]

    def apply(*tensors: relax.Expr) -> relax.Expr:
        return relax.op.nn.attention(*tensors, causal_mask="BottomRight" if workload.causal else None)

    return Operator((*inputs, *bias), (), apply)


def build_module(workload: Workload) -> tvm.IRModule:
    """Returns a workload as a Relax module with the function `main`."""
    operator = build_operator(workload)
    tensors = [
        relax.Var(f"x{number}", relax.TensorType(list(shape), dtype))
        for number, (shape, dtype) in enumerate((*operator.inputs, *operator.weights))
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", tensors, attrs={"num_input": len(operator.inputs)}):
        with builder.dataflow():
            expression = operator.apply(*tensors)
            # The note that its kernel may round operands.
            expression = allow_bf16(expression) if workload.dtype == BF16 else expression
            result = builder.emit_output(builder.emit(expression))
        builder.emit_func_output(result)
    return builder.get()


@lru_cache(maxsize=1)
def draw_arrays(workload: Workload) -> tuple[Array, ...]:
    """Draws the inputs and weights of a workload, always the same, such that results are about 1."""
    operator, generator = build_operator(workload), np.random.default_rng(0)
    arrays: list[Array] = []
    for number, (shape, dtype) in enumerate((*operator.inputs, *operator.weights)):
        if dtype == "bool":
            arrays.append(generator.random(shape) < 0.9)
        else:
            scale = np.float32(operator.terms**-0.5 if number == 1 else 1.0)
            arrays.append(generator.standard_normal(shape, np.float32) * scale)
    return tuple(arrays)


def build(workload: Workload, schedule: Schedule, target: str) -> Run:
    """Compiles a workload as a program of its own, and loads it with `draw_arrays` in memory of its own.

    Args:
        workload: The workload.
        schedule: Decisions about its kernel; omitted ones keep their default.
        target: TVM's target, as text.

    Raises:
        HarnessError: The schedule cannot be used.
        RuntimeError: There is no linker, or the compiler fails.
    """
    tvm_target = tvm.target.Target(target)
    lowered = lower_module(build_module(workload), HOST, tvm_target, {workload.key: schedule})
    with temporary_folder("tune") as folder:
        library = Path(folder) / f"kernel{LIBRARY_SUFFIX}"
        build_library(lowered, tvm_target, library)
        machine = load_library(library, tvm.cpu())
    tensors = [tvm.runtime.tensor(array) for array in draw_arrays(workload)]
    count = len(build_operator(workload).inputs)
    inputs, weights = tensors[:count], tensors[count:]
    if TRANSFORM_PARAMETERS in machine:
        weights = list(machine[TRANSFORM_PARAMETERS](weights))
    main = machine["main"]
    return lambda: main(*inputs, *weights)

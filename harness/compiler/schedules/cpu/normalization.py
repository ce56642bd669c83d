"""Normalizes layers and groups with exact moments.

Mean and variance come from two passes with fp64 sums over a line that is still in the cache (`reduction.emit_moments`);
the output is fp32 arithmetic on the centred value, so that a large common offset of the inputs costs no digits.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax, te

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, call_on_views, default, reshaped
from harness.compiler.schedules.common.kernel import Argument, prim_func
from harness.compiler.schedules.common.kernel_info import kernel
from harness.compiler.schedules.common.normalization import Normalization, recognized
from harness.compiler.schedules.cpu import reduction
from harness.compiler.schedules.cpu.bf16 import BF16, to_bf16
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.epilogue import Epilogue
from harness.compiler.schedules.cpu.lowering import Lowering
from harness.compiler.schedules.cpu.reduction import (
    LANES,
    emit_centre,
    emit_line_moments,
    emit_moments,
    inverse_root,
    scalar,
    tasks,
    to_f32,
)

_DTYPES = ("float32",)


def layer_norm_kernel(
    rows: int, count: int, epsilon: float, scaled: bool, shifted: bool, dtype: str = "float32"
) -> T.PrimFunc:
    """Normalizes each row of [rows, count]; parameters data, scale and shift [count] if there are, out of the dtype."""

    def body(data: T.Buffer, *rest: T.Buffer) -> None:
        *affine, out = rest
        with tasks(rows, rows * count) as i:
            mean, squares = emit_moments(count, lambda k: data[i, k])
            centred = emit_centre(mean)
            factor = scalar(inverse_root(squares, count, epsilon), "float32")

            def write(k: T.Index) -> None:
                value = centred(data[i, k]) * factor
                if scaled:
                    value = value * affine[0][k]
                if shifted:
                    value = value + affine[-1][k]
                T.buffer_store(out, to_bf16(value) if dtype == BF16 else value, [i, k])

            for_each_vector(count, LANES, write)

    names = [name for name, present in (("scale", scaled), ("shift", shifted)) if present]
    line = [Argument(name, (count,)) for name in names]
    arguments = [Argument("data", (rows, count)), *line, Argument("out", (rows, count), dtype)]
    return prim_func("layer_norm", arguments, body, kernel("nn.layer_norm", lines=rows, count=count))


def group_moments_kernel(lines: int, count: int, epsilon: float) -> T.PrimFunc:
    """Builds the moments of each line of data [lines, count]: out [lines, 3].

    Of each line out has the mean in two parts, the second far smaller, and 1/√(variance + ε). With few lines they are
    cut into chunks so that every thread has work.
    """

    def body(data: T.Buffer, out: T.Buffer) -> None:
        moments = emit_line_moments(lines, count, lambda i, k: data[i, k])
        with T.serial(0, lines) as i:
            mean, squares = moments(i)
            high = scalar(to_f32(mean), "float32")
            T.buffer_store(out, high, [i, 0])
            T.buffer_store(out, to_f32(mean - T.Cast("float64", high)), [i, 1])
            T.buffer_store(out, inverse_root(squares, count, epsilon), [i, 2])

    arguments = [Argument("data", (lines, count)), Argument("out", (lines, 3))]
    return prim_func("group_moments", arguments, body, kernel("nn.group_norm", lines=lines, count=count))


def _layer_norm(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    problem = recognized(node, _DTYPES)
    return default(bb, node) if problem is None else _called(bb, problem, problem.data, problem.affine)


def lower_rounded_layer_norm(node: relax.Call) -> Lowering | None:
    """Returns the lowering of a `relax.nn.layer_norm` whose result is stored in bfloat16; None if it has no kernel."""
    problem = recognized(node, _DTYPES)
    if problem is None:
        return None

    def build(bb: relax.BlockBuilder, inputs: Sequence[relax.Expr], _epilogue: Epilogue) -> relax.Expr:
        return _called(bb, problem, inputs[0], inputs[1:], BF16)

    return Lowering((problem.data, *problem.affine), None, build)


def _called(
    bb: relax.BlockBuilder,
    problem: Normalization,
    data: relax.Expr,
    affine: Sequence[relax.Expr],
    dtype: str = "float32",
) -> relax.Expr:
    """Emits the call of the kernel of a layer normalization, whose result has the dtype."""
    rows, count = problem.lines, problem.channels
    function = layer_norm_kernel(
        rows, count, problem.epsilon, problem.scale is not None, problem.shift is not None, dtype
    )
    name = f"layer_norm{'_astype' if dtype == BF16 else ''}_{rows}x{count}"
    return call_on_views(bb, name, function, [data, *affine], problem.shape)


def _group_norm(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    """Computes the moments in a kernel, and leaves the elementwise rest to the fusion with the activation."""
    problem = recognized(node, _DTYPES)
    if problem is None:
        return default(bb, node)
    lines, groups, channels, inner = problem.lines, problem.groups, problem.channels, problem.inner
    count = channels * inner
    function = group_moments_kernel(lines, count, problem.epsilon)
    moments = call_on_views(bb, f"group_moments_{lines}x{count}", function, [problem.data], (lines, 3))

    def normalized(data: te.Tensor, moments: te.Tensor, *affine: te.Tensor) -> te.Tensor:
        def element(i: T.Index, c: T.Index, k: T.Index) -> T.Expr:
            value: T.Expr = ((data[i, c, k] - moments[i, 0]) - moments[i, 1]) * moments[i, 2]
            if problem.scale is not None:
                value = value * affine[0][i % groups, c]
            if problem.shift is not None:
                value = value + affine[-1][i % groups, c]
            return value

        return te.compute((lines, channels, inner), element, name="normalized")

    affine = [reshaped(bb, operand, (groups, channels)) for operand in problem.affine]
    data = reshaped(bb, problem.data, (lines, channels, inner))
    result = bb.emit(bb.call_te(normalized, data, moments, *affine, primfunc_name_hint="normalized"))
    return reshaped(bb, result, problem.shape)


LEGALIZE: dict[str, Legalize] = {
    **reduction.LEGALIZE,
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.group_norm": _group_norm,
}
"""Legalizations of fp32 normalizations and reductions, by operator."""

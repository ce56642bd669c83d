"""Normalizes layers, groups and images with exact moments, and computes softmax.

Mean and variance come from two passes with fp64 sums over a line that is still in the cache (`reduction.emit_moments`);
the output is fp32 arithmetic on the centred value, so that a large common offset of the inputs costs no digits. Softmax
takes three passes over a row, with fp64 sums.

SAM 3's `LayerNorm2d` normalizes over the channels of an image, and is written out in seven operators over the whole:

    result[n, c, pixel] = (data[n, c, pixel] - mean[n, pixel]) / √(variance[n, pixel] + ε)

Here a task normalizes some neighbouring pixels, whose channels stay in the cache between the three times that they are
read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from tvm import ir, relax, te, topi

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import (
    Legalize,
    call,
    call_on_views,
    default,
    is_call,
    number,
    reshaped,
    static_shape,
)
from harness.compiler.schedules.common.kernel import Argument, prim_func, registers, scalar, view
from harness.compiler.schedules.common.kernel_info import KernelInfo, Kind, kernel
from harness.compiler.schedules.common.normalization import Normalization, recognized
from harness.compiler.schedules.cpu import math as elementary
from harness.compiler.schedules.cpu import reduction
from harness.compiler.schedules.cpu.bf16 import BF16, to_bf16
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.epilogue import Epilogue, ResultLayout
from harness.compiler.schedules.cpu.lowering import Context, Lowering
from harness.compiler.schedules.cpu.reduction import (
    LANES,
    Fold,
    add,
    each_block,
    emit_centre,
    emit_line_moments,
    emit_moments,
    fold_columns,
    fold_line,
    fp64,
    inverse_root,
    tasks,
    to_f32,
    to_f64,
)
from harness.compiler.schedules.cpu.window import image_layout

_CHANNELS_LAST = (0, 2, 3, 1)
"""Axes of the permutation from [batch, channels, height, width] to [batch, height, width, channels]."""
_DTYPES = ("float32",)


def layer_norm_kernel(problem: Normalization, dtype: str) -> T.PrimFunc:
    """Normalizes each row of [rows, count]; parameters data, scale and shift [count] if there are, out of the dtype."""
    rows, count = problem.lines, problem.channels

    def body(data: T.Buffer, *rest: T.Buffer) -> None:
        *affine, out = rest
        with tasks(rows, rows * count) as i:
            mean, squares = emit_moments(count, lambda k: data[i, k])
            centred = emit_centre(mean)
            factor = scalar(inverse_root(squares, count, problem.epsilon))

            def write(k: T.Index) -> None:
                value = problem.finished(centred(data[i, k]) * factor, affine, (k,))
                T.buffer_store(out, to_bf16(value) if dtype == BF16 else value, [i, k])

            for_each_vector(count, LANES, write)

    parameters = [Argument(name, (count,)) for name in problem.affine]
    arguments = [Argument("data", (rows, count)), *parameters, Argument("out", (rows, count), dtype)]
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
            high = scalar(to_f32(mean))
            T.buffer_store(out, high, [i, 0])
            T.buffer_store(out, to_f32(mean - T.Cast("float64", high)), [i, 1])
            T.buffer_store(out, inverse_root(squares, count, epsilon), [i, 2])

    arguments = [Argument("data", (lines, count)), Argument("out", (lines, 3))]
    return prim_func("group_moments", arguments, body, kernel("nn.group_norm", lines=lines, count=count))


def _layer_norm(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    problem = recognized(node, _DTYPES)
    return default(bb, node) if problem is None else _called(bb, problem, problem.data, *problem.affine.values())


def lower_rounded_layer_norm(node: relax.Call) -> Lowering | None:
    """Returns the lowering of a `relax.nn.layer_norm` whose result is stored in bfloat16; None if it has no kernel."""
    problem = recognized(node, _DTYPES)
    if problem is None:
        return None

    def build(bb: relax.BlockBuilder, inputs: Sequence[relax.Expr], _epilogue: Epilogue) -> relax.Expr:
        return _called(bb, problem, *inputs, dtype=BF16)

    return Lowering((problem.data, *problem.affine.values()), None, build)


def _called(
    bb: relax.BlockBuilder, problem: Normalization, *operands: relax.Expr, dtype: str = "float32"
) -> relax.Expr:
    """Emits the call of the kernel of a layer normalization, whose result has the dtype."""
    name = f"layer_norm{'_astype' if dtype == BF16 else ''}_{problem.lines}x{problem.channels}"
    return call_on_views(bb, name, layer_norm_kernel(problem, dtype), operands, problem.shape)


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
            return problem.finished(value, affine, (i % groups, c))

        return te.compute((lines, channels, inner), element, name="normalized")

    affine = [reshaped(bb, operand, (groups, channels)) for operand in problem.affine.values()]
    data = reshaped(bb, problem.data, (lines, channels, inner))
    result = bb.emit(bb.call_te(normalized, data, moments, *affine, primfunc_name_hint="normalized"))
    return reshaped(bb, result, problem.shape)


def lower_layer_norm_2d(context: Context, divide: ir.Call) -> Lowering | None:
    """Lowers the `relax.divide` that ends a normalization of [batch, channels, height, width] over its channels."""
    shape = static_shape(divide)
    if shape is None or len(shape) != 4 or 0 in shape:
        return None
    normalized = _normalized(context, divide)
    if normalized is None:
        return None
    data, epsilon = normalized
    batch, channels, pixels = shape[0], shape[1], shape[2] * shape[3]
    layout = _layout(shape)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        moved = any(step.axes is not None for step in epilogue.steps)
        info = KernelInfo(
            Kind.KERNEL,
            "nn.layer_norm",
            extents={"batch": batch, "channels": channels, "inner": pixels},
            writes=epilogue.operators,
        )

        def body(*buffers: T.Buffer) -> None:
            image, *extras, result = buffers
            store, _ = epilogue.write_back(layout, extras, result)
            rows = view(image, batch, channels, pixels)
            _normalize(rows, (batch, channels, pixels), epsilon, store, side_by_side="channels" if moved else "pixels")

        arguments = [Argument("data", shape), *epilogue.arguments, epilogue.result(layout)]
        name = "layer_norm_2d" + epilogue.label
        return call(builder, name, prim_func(name, arguments, body, info), inputs)

    return Lowering((data,), layout, build)


def _layout(shape: tuple[int, ...]) -> ResultLayout:
    """Returns the layout of results as images, or with the channels last, as some linear layers read them."""
    images = image_layout(shape)
    _, channels, height, width = shape

    def permuted(axes: tuple[int, ...]) -> ResultLayout | None:
        if axes != _CHANNELS_LAST:
            return None
        return ResultLayout(
            tuple(shape[axis] for axis in axes),
            lambda b, i, j: (b * (height * width) + j) * channels + i,
            lambda b, i, j: [images.coordinates(b, i, j)[axis] for axis in axes],
            frozenset(n for n, axis in enumerate(axes) if axis in images.cheap),
        )

    return replace(images, permuted=permuted)


def _normalize(
    rows: T.Buffer,
    extents: tuple[int, int, int],
    epsilon: float,
    store: Callable[[T.Index, T.Index, T.Index, T.Expr], None],
    side_by_side: Literal["pixels", "channels"],
) -> None:
    """Emits the normalization.

    Args:
        rows: [batch, channels, pixels].
        extents: The same numbers.
        epsilon: The number added to the variance.
        store: (image, channel, pixel, value): emits the store of a result.
        side_by_side: The results that are neighbours in memory, and so are stored as vectors.
    """
    batch, channels, pixels = extents

    def block(n: T.Index, first: T.Index, width: int) -> None:
        high, low, factor = (registers((width,)) for _ in range(3))

        def centred(c: T.Index, j: T.Index) -> T.Expr:
            return (rows[n, c, first + j] - high[j]) - low[j]

        def square(c: T.Index, j: T.Index) -> T.Expr:
            deviation: T.Expr = to_f64(centred(c, j))
            return deviation * deviation

        def each_pixel(body: Callable[[T.Index], None]) -> None:
            for_each_vector(width, LANES, body)

        (sums,) = fold_columns(channels, width, lambda j: [add(lambda c: to_f64(rows[n, c, first + j]))])
        each_pixel(lambda j: T.buffer_store(high, to_f32(sums[j] / fp64(channels)), [j]))
        each_pixel(lambda j: T.buffer_store(low, to_f32(sums[j] / fp64(channels) - to_f64(high[j])), [j]))
        (squares,) = fold_columns(channels, width, lambda j: [add(lambda c: square(c, j))])
        each_pixel(lambda j: T.buffer_store(factor, inverse_root(squares[j], channels, epsilon), [j]))
        if side_by_side == "pixels":
            with T.serial(0, channels) as c:
                each_pixel(lambda j: store(n, c, first + j, centred(c, j) * factor[j]))
            return
        with T.serial(0, width) as j:
            for_each_vector(channels, LANES, lambda c: store(n, c, first + j, centred(c, j) * factor[j]))

    each_block(batch, channels, pixels, block)


def _normalized(context: Context, divide: ir.Call) -> tuple[relax.Expr, float] | None:
    """Returns the tensor that a division normalizes over its channels, and ε; None for other divisions."""
    data, root = _deviation_of(context, divide.args[0]), context.definition(divide.args[1])
    if data is None or not is_call(root, "relax.sqrt"):
        return None
    variance = context.definition(root.args[0])
    epsilon = number(variance.args[1]) if is_call(variance, "relax.add") else None
    if epsilon is None:
        return None
    squares = _averaged_by(context, variance.args[0])
    deviation = None if squares is None else _squared_by(context, squares)
    same = None if deviation is None else _deviation_of(context, deviation)
    return (data, epsilon) if same is not None and same.same_as(data) else None


def _deviation_of(context: Context, value: relax.Expr) -> relax.Expr | None:
    """Returns whose deviation from its mean over the channels a value is; None if it is none."""
    subtract = context.definition(value)
    if not is_call(subtract, "relax.subtract"):
        return None
    data, mean = subtract.args
    averaged = _averaged_by(context, mean)
    return data if averaged is not None and averaged.same_as(data) else None


def _averaged_by(context: Context, value: relax.Expr) -> relax.Expr | None:
    """Returns whose mean over the channels of images a value is, which keeps its dimension; None if it is none."""
    mean = context.definition(value)
    if not is_call(mean, "relax.mean") or not mean.attrs.keepdims or mean.attrs.axis is None:
        return None
    return mean.args[0] if [int(axis) % 4 for axis in mean.attrs.axis] == [1] else None


def _squared_by(context: Context, value: relax.Expr) -> relax.Expr | None:
    """Returns whose square a value is; None if it is none."""
    square = context.definition(value)
    if is_call(square, "relax.power") and number(square.args[1]) == 2.0:
        return square.args[0]
    return square.args[0] if is_call(square, "relax.multiply") and square.args[0].same_as(square.args[1]) else None


def _greater(a: T.Expr, b: T.Expr) -> T.Expr:
    return T.Select(a > b, a, b)


def softmax_kernel(rows: int, count: int, log: bool) -> T.PrimFunc:
    """Builds softmax over each row of [rows, count].

    -inf gives 0; a row of nothing but -inf, or with +inf or NaN in it, gives NaN, as in PyTorch.
    """

    def body(data: T.Buffer, out: T.Buffer) -> None:
        with tasks(rows, rows * count) as i:
            (largest,) = fold_line(count, [Fold("float32", -math.inf, lambda m, k: _greater(data[i, k], m), _greater)])
            top = scalar(largest)
            # The exponentials go through memory: the next pass and the sum both read them.
            for_each_vector(count, LANES, lambda k: T.buffer_store(out, elementary.exp(data[i, k] - top), [i, k]))
            (total,) = fold_line(count, [add(lambda k: to_f64(out[i, k]))])
            if log:
                normalizer = scalar(to_f32(T.log(total)))
                for_each_vector(count, LANES, lambda k: T.buffer_store(out, (data[i, k] - top) - normalizer, [i, k]))
            else:
                normalizer = scalar(to_f32(total))
                for_each_vector(count, LANES, lambda k: T.buffer_store(out, out[i, k] / normalizer, [i, k]))

    shape = (rows, count)
    info = kernel("nn.log_softmax" if log else "nn.softmax", lines=rows, count=count)
    return prim_func("softmax", [Argument("data", shape), Argument("out", shape)], body, info)


def _softmax(log: bool) -> Legalize:
    def legalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
        data = node.args[0]
        shape = static_shape(data)
        if not shape or math.prod(shape) == 0:
            return default(bb, node)
        # Lines are runs of memory: another axis is moved to the end and back.
        axis, last = int(node.attrs.axis) % len(shape), len(shape) - 1
        swapped = [{axis: last, last: axis}.get(d, d) for d in range(len(shape))]
        rows = data if axis == last else bb.emit(bb.call_te(topi.transpose, data, swapped))
        outer, count = math.prod(shape) // shape[axis], shape[axis]
        name = f"{'log_' if log else ''}softmax_{outer}x{count}"
        result = call_on_views(bb, name, softmax_kernel(outer, count, log), [rows], [shape[d] for d in swapped])
        return result if axis == last else bb.call_te(topi.transpose, result, swapped)

    return legalize


LEGALIZE: dict[str, Legalize] = {
    **reduction.LEGALIZE,
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.group_norm": _group_norm,
    "relax.nn.softmax": _softmax(log=False),
    "relax.nn.log_softmax": _softmax(log=True),
}
"""Legalizations of fp32 normalizations, softmax and reductions, by operator."""

"""Normalizes over the channels of an image, as SAM 3's `LayerNorm2d` writes it out in single operators.

    result[n, c, pixel] = (data[n, c, pixel] - mean[n, pixel]) / √(variance[n, pixel] + ε)

The model computes it as seven operators over the whole image. Here a task normalizes some neighbouring pixels, whose
channels stay in the cache between the three times that they are read. Moments are exact, as in `normalization.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from tvm import ir, relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import call, is_call, number, static_shape
from harness.compiler.schedules.common.kernel import Argument, prim_func, registers, view
from harness.compiler.schedules.common.kernel_info import KernelInfo, Kind
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.epilogue import Epilogue, ResultLayout
from harness.compiler.schedules.cpu.lowering import Context, Lowering
from harness.compiler.schedules.cpu.reduction import (
    LANES,
    add,
    each_block,
    fold_columns,
    fp64,
    inverse_root,
    to_f32,
    to_f64,
)
from harness.compiler.schedules.cpu.window import image_layout

_CHANNELS_LAST = (0, 2, 3, 1)
"""Axes of the permutation from [batch, channels, height, width] to [batch, height, width, channels]."""


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

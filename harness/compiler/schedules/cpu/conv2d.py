"""Lowers two-dimensional convolutions, and transposed ones whose stride is their kernel, to products.

A convolution is weights times columns of the image, gathered block by block:

    result[n, g, o, pixel] = Σ_k weight[g, o, k] · column[n, g, k, pixel]     k = (channel, kernel row, kernel column)

The weights are the resident operand, rows of the product; the image streams, so that no more of the column matrix
exists than one panel per thread. Special cases: a kernel as large as the image is a plain matrix product over images; a
depthwise convolution has a kernel of its own (`depthwise.py`). An image that is upsampled by nearest neighbours is read
as it was before, where minimal filtering (`winograd.py`) can do its convolution.

In bfloat16 two channels are a pair, the second of them half of all channels after the first, so that pixels stay
neighbours; where whole panels are multiplied, an element may be four channels, each a quarter of all after the one
before. Where no instruction multiplies pairs, fp32 and minimal filtering are faster.

A transposed convolution is a product over input pixels, each of which becomes a patch:

    result[n, o, y · height + ky, x · width + kx] = Σ_c weight[c, o, ky, kx] · image[n, c, y, x]

Rows of the product are (filter, kernel row, kernel column), columns are pixels. The rows of one line of a kernel
alternate in a line of the result: they are interleaved in registers before they are stored, so that the epilogue is
computed, and stored, in vectors.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tvm import ir, relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import is_call, static_shape
from harness.compiler.schedules.common.kernel import view
from harness.compiler.schedules.common.scope import Scope
from harness.compiler.schedules.cpu.blocking import Blocking, Extents
from harness.compiler.schedules.cpu.columns import gather, pixels
from harness.compiler.schedules.cpu.contraction import Contraction, Resident, Streaming
from harness.compiler.schedules.cpu.depthwise import lower_depthwise
from harness.compiler.schedules.cpu.epilogue import ResultLayout
from harness.compiler.schedules.cpu.gemm import Operand, matrix_product
from harness.compiler.schedules.cpu.lowering import Context, Lowering, contracted
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.packing import Read
from harness.compiler.schedules.cpu.product import Interleaved
from harness.compiler.schedules.cpu.schedule import Convolution, TransposedConvolution, plan_of
from harness.compiler.schedules.cpu.tile import SHORTEST_RUN
from harness.compiler.schedules.cpu.window import Window, pair, shapes_of
from harness.compiler.schedules.cpu.winograd import filtered
from harness.compiler.schedules.cpu.winograd_plan import filterable, upsampled_plan

Column = T.Index | tuple[T.Index, T.Index]
"""A column of the product, or a column and the number of an element counted from there."""
_WIDEST_KERNEL = 4
"""Largest number of pixels of a kernel's line that are interleaved."""


def lower_conv2d(context: Context, conv: ir.Call) -> Lowering | None:
    """Lowers `relax.nn.conv2d`, NCHW, of static shape, in fp32 or with operands that it may round."""
    attributes = conv.attrs
    shapes = shapes_of(conv, "OIHW")
    if shapes is None:
        return None
    image, weight, result = shapes
    window = Window(
        image,
        result,
        (weight[2], weight[3]),
        pair(attributes.strides),
        pair(attributes.padding),
        pair(attributes.dilation),
        int(attributes.groups),
    )
    data, weights = conv.args
    before = before_upsampling(context, data)
    smaller = static_shape(before) if before is not None and context.is_parameter(weights) else None
    if smaller is not None and filterable(window) and window.padding == (1, 1):
        micro_kernel = context.micro_kernel(conv, window.filters, window.channels)
        plan = upsampled_plan(context.unit, replace(window, image=smaller), micro_kernel)
        return filtered(plan, before, weights)
    taps = math.prod(window.kernel)
    if window.covers_image:
        left = Operand(data, (), transposed=False)
        right = Operand(weights, (), transposed=True)
        extents = Extents(1, image[0], weight[0], window.depth)
        micro_kernel = context.micro_kernel(conv, image[0], window.channels, taps)
        return matrix_product(context, left, right, (), extents, result, micro_kernel)
    if window.channels == window.filters == 1:
        return lower_depthwise(context, window, data, weights)
    micro_kernel = context.micro_kernel(conv, window.filters, window.channels, taps)
    convolution = Convolution(window, at_load=context.is_parameter(weights), dtype=micro_kernel.multiplies)
    schedule = context.decide(convolution, micro_kernel)
    if schedule.get("filtering"):
        return filtered(plan_of(context.unit, window, schedule), data, weights)
    blocking = context.blocking(convolution, micro_kernel, schedule)
    return contracted(_contraction(window, data, weights, micro_kernel, blocking), rounds=micro_kernel is not FP32)


def before_upsampling(scope: Scope, value: relax.Expr) -> relax.Expr | None:
    """Returns the source of an image that repeats each pixel in both directions; None if it repeats none."""
    definition = scope.definition(value)
    if is_call(definition, "relax.image.resize2d"):
        attributes, (source, _) = definition.attrs, definition.args
        how = attributes.method, attributes.coordinate_transformation_mode, attributes.rounding_method
        shape, result_shape = static_shape(source), static_shape(value)
        is_doubled = shape is not None and result_shape == (*shape[:2], *(2 * extent for extent in shape[2:]))
        return source if is_doubled and how == ("nearest_neighbor", "asymmetric", "floor") else None
    axes: list[int] = []
    while is_call(definition, "relax.repeat") and int(definition.attrs.repeats) == 2 and definition.attrs.axis:
        axes.append(int(definition.attrs.axis))
        value = definition.args[0]
        definition = scope.definition(value)
    return value if sorted(axes) == [2, 3] else None


def _contraction(
    window: Window, data: relax.Expr, weights: relax.Expr, micro_kernel: MicroKernel, blocking: Blocking
) -> Contraction:
    """Describes the product of the weights and the columns of the image, which are gathered if they are not there."""
    groups, extents = window.groups, window.extents

    def read(buffer: T.Buffer) -> Read:
        rows = view(buffer, groups, window.filters, window.depth)
        return lambda g, i, k: rows[g, i, k]

    return Contraction(
        "nn.conv2d",
        extents,
        Streaming("right", data, pixels(extents) if window.pointwise else gather(window)),
        Resident(weights, groups, read, lambda b: b % groups),
        window.layout,
        micro_kernel,
        blocking,
    )


def lower_conv2d_transpose(context: Context, conv: ir.Call) -> Lowering | None:
    """Lowers `relax.nn.conv2d_transpose` whose kernel tiles the result (stride = kernel, no padding), NCHW."""
    attributes = conv.attrs
    shapes = shapes_of(conv, "IOHW")
    if shapes is None:
        return None
    image, weight, result = shapes
    tiles = (
        pair(attributes.strides) == weight[2:]
        and {*map(int, attributes.padding), *map(int, attributes.output_padding)} == {0}
        and pair(attributes.dilation) == (1, 1)
        and int(attributes.groups) == 1
    )
    if not tiles:
        return None
    micro_kernel = context.micro_kernel(conv, math.prod(weight[1:]), image[1])
    convolution = TransposedConvolution(
        image, weight, at_load=context.is_parameter(conv.args[1]), dtype=micro_kernel.multiplies
    )
    blocking = context.blocking(convolution, micro_kernel)
    contraction = _transposed_contraction(convolution, conv, result, micro_kernel, blocking)
    return contracted(contraction, rounds=micro_kernel is not FP32)


def _transposed_contraction(
    convolution: TransposedConvolution,
    conv: ir.Call,
    result: tuple[int, ...],
    micro_kernel: MicroKernel,
    blocking: Blocking,
) -> Contraction:
    """Describes the product of weights, [filters · kernel pixels, channels], and images."""
    (data, weights), extents = conv.args, convolution.extents
    kernel, width = convolution.weight[2:], convolution.image[3]
    run = blocking.tile.run(width)
    # All rows of a line of the kernel are in one register tile.
    interleaves = 1 < kernel[1] <= _WIDEST_KERNEL and blocking.tile.rows % kernel[1] == 0 and run >= SHORTEST_RUN

    def read(buffer: T.Buffer) -> Read:
        columns = view(buffer, extents.depth, extents.rows)
        return lambda _, i, k: columns[k, i]

    return Contraction(
        "nn.conv2d_transpose",
        extents,
        Streaming("right", data, pixels(extents)),
        Resident(weights, 1, read, lambda _: 0),
        _patch_layout(result, kernel),
        micro_kernel,
        blocking,
        Interleaved(kernel[1], run) if interleaves else None,
    )


def _patch_layout(result: tuple[int, ...], kernel: tuple[int, ...]) -> ResultLayout:
    """Returns the layout of results: each row by itself, or the first row of a kernel's line with the whole line.

    Together, a column is a pair: the first pixel, and the number of the element counted from that pixel's patch.
    """
    _, channels, height, width = result
    pixels = width // kernel[1]

    def coordinates(b: T.Index, i: T.Index, j: Column) -> list[T.Index]:
        pixel, element = j if isinstance(j, tuple) else (j, 0)
        down, right = i // kernel[1] % kernel[0], i % kernel[1]
        y, x = pixel // pixels * kernel[0] + down, pixel % pixels * kernel[1] + right
        return [b, i // math.prod(kernel), y, x + element]

    def flat(b: T.Index, i: T.Index, j: Column) -> T.Index:
        n, c, y, x = coordinates(b, i, j)
        return ((n * channels + c) * height + y) * width + x

    return ResultLayout(result, flat, coordinates, frozenset({0, 1}), contiguous=False)

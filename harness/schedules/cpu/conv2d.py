"""Two-dimensional convolutions as products: weights times columns of the image, gathered block by block.

    result[n, g, o, pixel] = Σ_k weight[g, o, k] · column[n, g, k, pixel]     k = (channel, kernel row, kernel column)

The weights are the resident operand, rows of the product; the image streams, so that no more of the column matrix
exists than one panel per thread. Special cases: a kernel as large as the image is a plain matrix product over images; a
transposed convolution whose stride is its kernel scatters a product over input pixels; a depthwise convolution has a
kernel of its own.

In bfloat16 two channels are a pair, the second of them half of all channels after the first, so that pixels stay
neighbours; where whole panels are multiplied, an element may be four channels, each a quarter of all after the one
before. Where no instruction multiplies pairs, fp32 and minimal filtering are faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import ir, relax, tirx
from tvm.script.ir_builder import tirx as T

from harness.schedules.common.graph import call, static_shape
from harness.schedules.common.kernel import Argument, fp32, prim_func, registers, view
from harness.schedules.common.kernel_info import DEPTHWISE, KernelInfo, Kind
from harness.schedules.cpu.emit import FP32, Arithmetic, for_each_vector, vectors
from harness.schedules.cpu.epilogue import Epilogue, ResultLayout
from harness.schedules.cpu.gemm import Operand, kernel_name, matrix_product
from harness.schedules.cpu.lowering import Context, Lowering
from harness.schedules.cpu.product import (
    Access,
    Blocking,
    Extents,
    Fill,
    Pack,
    Put,
    Read,
    pack_function,
    product_function,
    read_left,
    stream,
)
from harness.schedules.cpu.schedule import (
    Convolution,
    TransposedConvolution,
    blocking_in_tiles,
    blocking_of,
    plan_of,
)
from harness.schedules.cpu.tile import Tile
from harness.schedules.cpu.window import Window
from harness.schedules.cpu.winograd import filtered


def lower_conv2d(context: Context, conv: ir.Call) -> Lowering | None:
    """Lowers `relax.nn.conv2d`, NCHW, of static shape, in fp32 or with operands that it may round."""
    attributes = conv.attrs
    image, weight, result = static_shape(conv.args[0]), static_shape(conv.args[1]), static_shape(conv)
    layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
    if layouts != ("NCHW", "OIHW", "NCHW") or image is None or weight is None or result is None or 0 in image + result:
        return None
    window = Window(
        image,
        result,
        (weight[2], weight[3]),
        _pair(attributes.strides),
        _pair(attributes.padding),
        _pair(attributes.dilation),
        int(attributes.groups),
    )
    data, weights = conv.args
    taps = math.prod(window.kernel)
    if window.covers_image:
        left = Operand(data, image, (), transposed=False)
        right = Operand(weights, weight, (), transposed=True)
        extents = Extents(1, image[0], weight[0], window.depth)
        arithmetic = context.multiplied(conv, image[0], window.channels, taps)
        return matrix_product(context, left, right, (), extents, result, arithmetic)
    if window.channels == window.filters == 1:
        return _depthwise(context, window, data, weights, weight)
    arithmetic = context.multiplied(conv, window.filters, window.channels, taps)
    if arithmetic.tiles is not None:
        extents = Convolution(window).extents.packed(arithmetic.terms)
        blocking = blocking_in_tiles(arithmetic.tiles, extents, "right", context.unit.lanes)
        return _columns(blocking, extents, window, data, weights, weight, arithmetic)
    convolution = Convolution(window, context.is_parameter(weights), arithmetic.multiplies)
    decided = context.decide(convolution)
    if decided.get("filtering"):
        return filtered(plan_of(context.unit, window, decided), data, weights)
    extents = convolution.extents.packed(arithmetic.terms)
    blocking = blocking_of(context.unit, extents, "right", decided)
    return _columns(blocking, extents, window, data, weights, weight, arithmetic)


def lower_conv2d_transpose(context: Context, conv: ir.Call) -> Lowering | None:
    """Lowers `relax.nn.conv2d_transpose` whose kernel tiles the result (stride = kernel, no padding), NCHW."""
    attributes = conv.attrs
    image, weight, result = static_shape(conv.args[0]), static_shape(conv.args[1]), static_shape(conv)
    layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
    if layouts != ("NCHW", "IOHW", "NCHW") or image is None or weight is None or result is None or 0 in image + result:
        return None
    tiles = (
        _pair(attributes.strides) == weight[2:]
        and {*map(int, attributes.padding), *map(int, attributes.output_padding)} == {0}
        and _pair(attributes.dilation) == (1, 1)
        and int(attributes.groups) == 1
    )
    arithmetic = context.multiplied(conv, math.prod(weight[1:]), image[1])
    return _scatter(context, conv.args[0], conv.args[1], image, weight, result, arithmetic) if tiles else None


def _pair(values: Sequence[Any]) -> tuple[int, int]:
    return int(values[0]), int(values[1])


def _columns(
    blocking: Blocking,
    extents: Extents,
    window: Window,
    data: relax.Expr,
    weights: relax.Expr,
    weight: tuple[int, ...],
    arithmetic: Arithmetic,
) -> Lowering:
    """Lowers the general convolution."""
    tile = blocking.tile
    layout = window.layout

    def weight_reader(buffer: tirx.Buffer) -> Read:
        rows = view(buffer, window.groups, window.filters, window.depth)
        return lambda g, i, k: arithmetic.joined(lambda term: rows[g, i, term], k, extents.depth)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        source = Argument("weight", weight)
        packing = pack_function(
            "left", source, window.groups, window.filters, extents.depth, tile, weight_reader, arithmetic
        )
        packed = builder.emit(call(builder, "pack", packing, [inputs[1]]))

        def body(*buffers: tirx.Buffer) -> Access:
            image, panels, *extras, result = buffers
            store, touched = epilogue.write_back(layout, extras, result)
            if window.pointwise:
                rows = view(image, extents.batch, window.channels, window.pixels)
                pack = stream(_columns_of(rows, arithmetic, extents), window.pixels, tile.columns, tile.lanes)
            else:
                pack = _gather(window, tile, image, arithmetic)
            packed_weights = read_left(panels, arithmetic)
            return Access(pack, lambda b, p, k, i: packed_weights(b % window.groups, p, k, i), store, touched)

        name = kernel_name("conv2d", arithmetic, epilogue)
        packed_shape = tuple(int(extent) for extent in packed.ty.shape)
        pixels = Argument("image", window.image, str(inputs[0].ty.dtype))
        operands = [pixels, Argument("packed", packed_shape, arithmetic.dtype)]
        info = KernelInfo(Kind.KERNEL, "nn.conv2d", writes=epilogue.operators)
        arguments = [*operands, *epilogue.arguments, epilogue.result(layout)]
        function = product_function(name, extents, "right", blocking, arguments, body, info, arithmetic=arithmetic)
        return call(builder, name, function, [inputs[0], packed, *inputs[2:]])

    return Lowering((data, weights), layout, build, rounds=arithmetic is not FP32)


def _columns_of(rows: tirx.Buffer, arithmetic: Arithmetic, extents: Extents) -> Read:
    """(matrix, column, k) → element of columns that lie side by side: [matrix, row, column]."""
    return lambda b, j, k: arithmetic.joined(lambda row: rows[b, row, j], k, extents.depth)


def _gather(window: Window, tile: Tile, image: tirx.Buffer, arithmetic: Arithmetic) -> Pack:
    """Packs the columns of one panel of output pixels; padding reads as zero, the last pixel is repeated."""
    height, width = window.image[2:]
    (kernel_height, kernel_width), out_width = window.kernel, window.result[3]
    matrices = window.image[0] * window.groups
    planes = view(image, matrices, window.channels, height, width)
    flat = view(image, matrices, window.channels, height * width)
    # Then a panel of neighbouring pixels reads neighbouring pixels, across the ends of lines too.
    keeps_lines = window.strides == (1, 1) and out_width == width

    taps = math.prod(window.kernel)
    zero = tirx.const(0, arithmetic.dtype)

    def of_channels(read: Callable[[Any], Any], first: Any) -> Any:
        return arithmetic.joined(read, first, window.channels // arithmetic.terms)

    def pack(b: Any, first: Any) -> Fill:
        tops = registers((tile.columns,), "int32")
        lefts = registers((tile.columns,), "int32")
        inside = T.alloc_buffer((taps, tile.columns), "int32")
        with T.serial(0, tile.columns) as j:
            pixel = T.Bind(T.min(first + j, window.pixels - 1))
            T.buffer_store(tops, pixel // out_width * window.strides[0] - window.padding[0], [j])
            T.buffer_store(lefts, pixel % out_width * window.strides[1] - window.padding[1], [j])
        with T.serial(0, kernel_height) as ky, T.serial(0, kernel_width) as kx, T.serial(0, tile.columns) as j:
            y, x = tops[j] + ky * window.dilation[0], lefts[j] + kx * window.dilation[1]
            within = tirx.all(y >= 0, y < height, x >= 0, x < width)
            T.buffer_store(inside, tirx.Cast("int32", within), [ky * kernel_width + kx, j])

        def fill(put: Put, start: Any, count: Any) -> None:
            with T.serial(0, count) as k:
                c, tap = T.Bind((start + k) // taps), T.Bind((start + k) % taps)
                down = T.Bind(tap // kernel_width * window.dilation[0])
                right = T.Bind(tap % kernel_width * window.dilation[1])

                def element() -> None:
                    with T.serial(0, tile.columns) as j:
                        y, x = tops[j] + down, lefts[j] + right
                        value = of_channels(lambda channel: planes[b, channel, y, x], c)
                        put(k, j, T.if_then_else(inside[tap, j] != 0, value, zero))

                if not keeps_lines:
                    element()
                    return
                pixel = T.Bind(first + (down - window.padding[0]) * width + right - window.padding[1])
                with T.If(tirx.all(pixel >= 0, pixel + tile.columns <= height * width)):
                    with T.Then():

                        def neighbours(j: Any) -> None:
                            value = of_channels(lambda channel: flat[b, channel, pixel + j], c)
                            put(k, j, T.Select(inside[tap, j] != 0, value, zero))

                        for_each_vector(tile.columns, tile.lanes, neighbours)
                    with T.Else():
                        element()

        return fill

    return pack


def _scatter(
    context: Context,
    data: relax.Expr,
    weights: relax.Expr,
    image: tuple[int, ...],
    weight: tuple[int, ...],
    result: tuple[int, ...],
    arithmetic: Arithmetic,
) -> Lowering:
    """Lowers a transposed convolution without overlap: (output channel, kernel pixel) × input channels × pixels."""
    batch, depth, _, width = image
    _, filters, kernel_height, kernel_width = weight
    convolution = TransposedConvolution(image, weight, context.is_parameter(weights), arithmetic.multiplies)
    extents = convolution.extents.packed(arithmetic.terms)
    if arithmetic.tiles is not None:
        blocking = blocking_in_tiles(arithmetic.tiles, extents, "right", context.unit.lanes)
    else:
        blocking = blocking_of(context.unit, extents, "right", context.decide(convolution))
    tile = blocking.tile

    def coordinates(b: Any, i: Any, j: Any) -> list[Any]:
        return [
            b,
            i // (kernel_height * kernel_width),
            j // width * kernel_height + i // kernel_width % kernel_height,
            j % width * kernel_width + i % kernel_width,
        ]

    def flat(b: Any, i: Any, j: Any) -> Any:
        n, c, y, x = coordinates(b, i, j)
        return ((n * filters + c) * result[2] + y) * result[3] + x

    layout = ResultLayout(result, flat, coordinates, frozenset({0, 1}))

    def weight_reader(buffer: tirx.Buffer) -> Read:
        columns = view(buffer, depth, extents.rows)
        return lambda _, i, k: arithmetic.joined(lambda row: columns[row, i], k, extents.depth)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        source = Argument("weight", weight)
        packing = pack_function("left", source, 1, extents.rows, extents.depth, tile, weight_reader, arithmetic)
        packed = builder.emit(call(builder, "pack", packing, [inputs[1]]))

        def body(*buffers: tirx.Buffer) -> Access:
            pixels, panels, *extras, output = buffers
            rows = view(pixels, batch, depth, extents.columns)
            store, _ = epilogue.write_back(layout, extras, output)
            pack = stream(_columns_of(rows, arithmetic, extents), extents.columns, tile.columns, tile.lanes)
            packed_weights = read_left(panels, arithmetic)
            return Access(pack, lambda _, p, k, i: packed_weights(0, p, k, i), store)

        name = kernel_name("conv2d_transpose", arithmetic, epilogue)
        packed_shape = tuple(int(extent) for extent in packed.ty.shape)
        source = Argument("image", image, str(inputs[0].ty.dtype))
        operands = [source, Argument("packed", packed_shape, arithmetic.dtype)]
        info = KernelInfo(Kind.KERNEL, "nn.conv2d_transpose", writes=epilogue.operators)
        arguments = [*operands, *epilogue.arguments, epilogue.result(layout)]
        function = product_function(name, extents, "right", blocking, arguments, body, info, arithmetic=arithmetic)
        return call(builder, name, function, [inputs[0], packed, *inputs[2:]])

    return Lowering((data, weights), layout, build, rounds=arithmetic is not FP32)


def _depthwise(
    context: Context, window: Window, data: relax.Expr, weights: relax.Expr, weight: tuple[int, ...]
) -> Lowering:
    """Lowers one filter per channel: each task pads one plane into its workspace and slides the kernel over it."""
    batch, channels, height, width = window.image
    out_height, out_width = window.result[2:]
    (kernel_height, kernel_width), (stride_y, stride_x) = window.kernel, window.strides
    padded_height = (out_height - 1) * stride_y + (kernel_height - 1) * window.dilation[0] + 1
    padded_width = (out_width - 1) * stride_x + (kernel_width - 1) * window.dilation[1] + 1
    top, left = window.padding
    layout = window.layout
    lanes = context.unit.lanes

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        def body(*buffers: tirx.Buffer) -> None:
            image, filters, *extras, result = buffers
            planes = view(image, batch * channels, height, width)
            store, _ = epilogue.write_back(layout, extras, result)
            with T.parallel(0, batch * channels) as plane:
                padded = T.alloc_buffer((padded_height, padded_width), "float32")
                with T.serial(0, padded_height) as y, T.serial(0, padded_width) as x:
                    inside = tirx.all(y >= top, y < top + height, x >= left, x < left + width)
                    T.buffer_store(padded, T.if_then_else(inside, planes[plane, y - top, x - left], fp32(0.0)), [y, x])
                with T.serial(0, out_height) as y:
                    for start, count in vectors(out_width, lanes):
                        total = registers((count,))
                        with T.vectorized(0, count) as j:
                            T.buffer_store(total, fp32(0.0), [j])
                        with T.serial(0, kernel_height) as ky, T.serial(0, kernel_width) as kx:
                            factor = filters[plane % channels, 0, ky, kx]
                            with T.vectorized(0, count) as j:
                                row = y * stride_y + ky * window.dilation[0]
                                column = (start + j) * stride_x + kx * window.dilation[1]
                                T.buffer_store(total, total[j] + factor * padded[row, column], [j])
                        with T.vectorized(0, count) as j:
                            pixel = y * out_width + start + j
                            store(plane, 0, pixel, total[j])

        name = "depthwise" + epilogue.label
        arguments = [Argument("image", window.image), Argument("weight", weight), *epilogue.arguments]
        info = KernelInfo(
            Kind.KERNEL,
            "nn.conv2d",
            DEPTHWISE,
            window.sizes,
            writes=epilogue.operators,
            flop=2 * math.prod((*window.result, *window.kernel)),
        )
        function = prim_func(name, [*arguments, epilogue.result(layout)], body, info)
        return call(builder, name, function, inputs)

    return Lowering((data, weights), layout, build)

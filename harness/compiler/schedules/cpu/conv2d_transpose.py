"""Lowers transposed convolutions whose stride is their kernel to products over input pixels, each a patch.

    result[n, o, y · height + ky, x · width + kx] = Σ_c weight[c, o, ky, kx] · image[n, c, y, x]

Rows of the product are (filter, kernel row, kernel column), columns are pixels. The rows of one line of a kernel
alternate in a line of the result: they are interleaved in registers before they are stored, so that the epilogue is
computed, and stored, in vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import ir, relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import call
from harness.compiler.schedules.common.kernel import Argument, view
from harness.compiler.schedules.common.kernel_info import KernelInfo, Kind
from harness.compiler.schedules.cpu.columns import columns_of
from harness.compiler.schedules.cpu.epilogue import Epilogue, ResultLayout
from harness.compiler.schedules.cpu.gemm import kernel_name
from harness.compiler.schedules.cpu.lowering import Context, Lowering
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.packing import Read, pack_function, read_left, stream
from harness.compiler.schedules.cpu.product import Access, Interleaved, product_function
from harness.compiler.schedules.cpu.schedule import TransposedConvolution, blocking_of
from harness.compiler.schedules.cpu.tile import SHORTEST_RUN, Tile
from harness.compiler.schedules.cpu.window import pair, shapes_of

_WIDEST_KERNEL = 4
"""Largest number of pixels of a kernel's line that are interleaved."""


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
    arithmetic = context.micro_kernel(conv, math.prod(weight[1:]), image[1])
    return _product(context, conv.args[0], conv.args[1], image, weight, result, arithmetic) if tiles else None


def _product(
    context: Context,
    data: relax.Expr,
    weights: relax.Expr,
    image: tuple[int, ...],
    weight: tuple[int, ...],
    result: tuple[int, ...],
    arithmetic: MicroKernel,
) -> Lowering:
    """Lowers the product of weights, [filters · kernel pixels, channels], and images."""
    batch, depth, _, width = image
    kernel_width = weight[3]
    convolution = TransposedConvolution(image, weight, context.is_parameter(weights), arithmetic.multiplies)
    extents = convolution.extents.packed(arithmetic.terms)
    decided = context.decide(convolution, arithmetic)
    blocking = blocking_of(arithmetic, context.unit, extents, "right", decided)
    tile = blocking.tile
    rows_together = _interleaves(kernel_width, width, tile)
    layout = _layout(result, (weight[2], kernel_width), rows_together=rows_together)

    def weight_reader(buffer: T.Buffer) -> Read:
        columns = view(buffer, depth, extents.rows)
        return lambda _, i, k: arithmetic.pack(lambda row: columns[row, i], k, extents.depth)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        source = Argument("weight", weight)
        packing = pack_function("left", source, 1, extents.rows, extents.depth, tile, weight_reader, arithmetic)
        packed = builder.emit(call(builder, "pack", packing, [inputs[1]]))

        def body(*buffers: T.Buffer) -> Access:
            pixels, panels, *extras, output = buffers
            rows = view(pixels, batch, depth, extents.columns)
            store, _ = epilogue.write_back(layout, extras, output)
            lines = Interleaved(kernel_width, tile.run(width), lambda b, i, j, n, value: store(b, i, (j, n), value))
            pack = stream(columns_of(rows, arithmetic, extents), extents.columns, tile.columns, tile.lanes)
            packed_weights = read_left(panels, arithmetic)

            def read(_: Any, p: Any, k: Any, i: Any) -> Any:
                return packed_weights(0, p, k, i)

            return Access(pack, read, store, interleaved=lines if rows_together else None)

        name = kernel_name("conv2d_transpose", arithmetic, epilogue)
        packed_shape = tuple(int(extent) for extent in packed.ty.shape)
        source = Argument("image", image, str(inputs[0].ty.dtype))
        operands = [source, Argument("packed", packed_shape, arithmetic.dtype)]
        info = KernelInfo(Kind.KERNEL, "nn.conv2d_transpose", writes=epilogue.operators)
        arguments = [*operands, *epilogue.arguments, epilogue.result(layout)]
        function = product_function(name, extents, "right", blocking, arguments, body, info, kernel=arithmetic)
        return call(builder, name, function, [inputs[0], packed, *inputs[2:]])

    return Lowering((data, weights), layout, build, rounds=arithmetic is not FP32)


def _interleaves(kernel_width: int, width: int, tile: Tile) -> bool:
    """Returns whether rows of a line of the kernel are put together: all of them are in one register tile."""
    fits = 1 < kernel_width <= _WIDEST_KERNEL and tile.rows % kernel_width == 0
    return fits and tile.run(width) >= SHORTEST_RUN


def _layout(result: tuple[int, ...], kernel: tuple[int, int], *, rows_together: bool) -> ResultLayout:
    """Returns the layout of results: each row by itself, or the first row of a kernel's line with the whole line.

    Together, a column is a pair: the first pixel, and the number of the element counted from that pixel's patch.
    """
    _, channels, height, width = result
    pixels = width // kernel[1]

    def coordinates(b: Any, i: Any, j: Any) -> list[Any]:
        pixel, element = j if rows_together else (j, 0)
        down, right = i // kernel[1] % kernel[0], i % kernel[1]
        y, x = pixel // pixels * kernel[0] + down, pixel % pixels * kernel[1] + right
        return [b, i // math.prod(kernel), y, x + element]

    def flat(b: Any, i: Any, j: Any) -> Any:
        n, c, y, x = coordinates(b, i, j)
        return ((n * channels + c) * height + y) * width + x

    return ResultLayout(result, flat, coordinates, frozenset({0, 1}))

"""Lowers transposed convolutions whose stride is their kernel to products over input pixels, each a patch.

    result[n, o, y · height + ky, x · width + kx] = Σ_c weight[c, o, ky, kx] · image[n, c, y, x]

Rows of the product are (filter, kernel row, kernel column), columns are pixels. The rows of one line of a kernel
alternate in a line of the result: they are interleaved in registers before they are stored, so that the epilogue is
computed, and stored, in vectors.
"""

from __future__ import annotations

import math

from tvm import ir

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import view
from harness.compiler.schedules.cpu.blocking import Blocking
from harness.compiler.schedules.cpu.columns import pixels
from harness.compiler.schedules.cpu.contraction import Contraction, Resident, Streaming
from harness.compiler.schedules.cpu.epilogue import ResultLayout
from harness.compiler.schedules.cpu.lowering import Context, Lowering, contracted
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.packing import Read
from harness.compiler.schedules.cpu.product import Interleaved
from harness.compiler.schedules.cpu.schedule import TransposedConvolution
from harness.compiler.schedules.cpu.tile import SHORTEST_RUN, Tile
from harness.compiler.schedules.cpu.window import pair, shapes_of

Column = T.Index | tuple[T.Index, T.Index]
"""A column of the product, or a column and the number of an element counted from there."""
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
    if not tiles:
        return None
    micro_kernel = context.micro_kernel(conv, math.prod(weight[1:]), image[1])
    convolution = TransposedConvolution(
        image, weight, at_load=context.is_parameter(conv.args[1]), dtype=micro_kernel.multiplies
    )
    blocking = context.blocking(convolution, micro_kernel)
    return contracted(_contraction(convolution, conv, result, micro_kernel, blocking), rounds=micro_kernel is not FP32)


def _contraction(
    convolution: TransposedConvolution,
    conv: ir.Call,
    result: tuple[int, ...],
    micro_kernel: MicroKernel,
    blocking: Blocking,
) -> Contraction:
    """Describes the product of weights, [filters · kernel pixels, channels], and images."""
    (data, weights), extents = conv.args, convolution.extents
    kernel, width = convolution.weight[2:], convolution.image[3]
    rows_together = _interleaves(kernel[1], width, blocking.tile)

    def read(buffer: T.Buffer) -> Read:
        columns = view(buffer, extents.depth, extents.rows)
        return lambda _, i, k: columns[k, i]

    return Contraction(
        "nn.conv2d_transpose",
        extents,
        Streaming("right", data, pixels(extents)),
        Resident(weights, 1, read, lambda _: 0),
        _layout(result, kernel),
        micro_kernel,
        blocking,
        Interleaved(kernel[1], blocking.tile.run(width)) if rows_together else None,
    )


def _interleaves(kernel_width: int, width: int, tile: Tile) -> bool:
    """Returns whether rows of a line of the kernel are put together: all of them are in one register tile."""
    fits = 1 < kernel_width <= _WIDEST_KERNEL and tile.rows % kernel_width == 0
    return fits and tile.run(width) >= SHORTEST_RUN


def _layout(result: tuple[int, ...], kernel: tuple[int, ...]) -> ResultLayout:
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

"""Builds depthwise convolutions, with one filter for each channel.

A task pads one plane into its workspace and slides the kernel over it. Several vectors of a line are summed at a time:
a tap of the filter is loaded once for all of them, and their sums do not wait for each other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import call
from harness.compiler.schedules.common.kernel import Argument, fp32, prim_func, registers, view
from harness.compiler.schedules.common.kernel_info import DEPTHWISE, KernelInfo, Kind
from harness.compiler.schedules.cpu.emit import fill, for_each_vector, vectors
from harness.compiler.schedules.cpu.epilogue import Epilogue
from harness.compiler.schedules.cpu.lowering import Context, Lowering
from harness.compiler.schedules.cpu.window import Window

_SUMS = 6
"""Number of vectors that are summed at a time; with their operands they fit sixteen registers."""
_VECTOR = 16
"""Elements that are copied at a time."""


def lower_depthwise(context: Context, window: Window, data: relax.Expr, weights: relax.Expr) -> Lowering:
    """Lowers a convolution with as many groups as channels, [channels, 1, height, width], in fp32."""
    layout = window.layout
    channels = window.image[1]

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        def body(*buffers: T.Buffer) -> None:
            image, filters, *extras, result = buffers
            store, _ = epilogue.write_back(layout, extras, result)
            with T.parallel(0, window.image[0] * channels) as plane:
                padded = _padded(window, image, plane)
                with T.serial(0, window.result[2]) as y:
                    for pieces in _sum_group(vectors(window.result[3], context.unit.lanes)):
                        for (start, count), sums in zip(
                            pieces, _sums(window, padded, filters, plane % channels, y, pieces), strict=True
                        ):
                            with T.vectorized(0, count) as j:
                                store(plane, 0, y * window.result[3] + start + j, sums[j])

        name = "depthwise" + epilogue.label
        shape = (channels, 1, *window.kernel)
        arguments = [Argument("image", window.image), Argument("weight", shape), *epilogue.arguments]
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


def _padded(window: Window, image: T.Buffer, plane: T.Index) -> T.Buffer:
    """Emits a copy of a plane with zeros around it, as far as the kernel reads."""
    height, width = window.image[2:]
    top, left = window.padding
    padded_height, padded_width = (
        (outputs - 1) * stride + (taps - 1) * dilation + 1
        for outputs, stride, taps, dilation in zip(
            window.result[2:], window.strides, window.kernel, window.dilation, strict=True
        )
    )
    planes = view(image, window.image[0] * window.image[1], height, width)
    padded = T.alloc_buffer((padded_height, padded_width), "float32")
    line = view(padded, padded_height * padded_width)
    fill(line, _VECTOR, 0.0)
    # What a stride passes over at the end is not copied; nothing is, where the kernel reads padding alone.
    with T.serial(0, max(0, min(height, padded_height - top))) as y:
        for_each_vector(
            max(0, min(width, padded_width - left)),
            _VECTOR,
            lambda x: T.buffer_store(padded, planes[plane, y, x], [y + top, x + left]),
        )
    return padded


def _sums(
    window: Window,
    padded: T.Buffer,
    filters: T.Buffer,
    channel: T.Index,
    y: T.Index,
    pieces: Sequence[tuple[int, int]],
) -> list[T.Buffer]:
    """Emits the sums of (start, width) pieces of line y of the result, tap after tap, and returns them."""
    sums = [registers((count,)) for _, count in pieces]
    for (_, count), total in zip(pieces, sums, strict=True):
        with T.vectorized(0, count) as j:
            T.buffer_store(total, fp32(0.0), [j])
    with T.serial(0, window.kernel[0]) as ky, T.serial(0, window.kernel[1]) as kx:
        row = T.Bind(y * window.strides[0] + ky * window.dilation[0])
        factor = T.Bind(filters[channel, 0, ky, kx])
        for (start, count), total in zip(pieces, sums, strict=True):
            with T.vectorized(0, count) as j:
                column = (start + j) * window.strides[1] + kx * window.dilation[1]
                T.buffer_store(total, total[j] + factor * padded[row, column], [j])
    return sums


def _sum_group(pieces: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    """Cuts pieces into as few groups of `_SUMS` as will do, of about equal length."""
    groups = math.ceil(len(pieces) / _SUMS)
    bounds = [len(pieces) * n // groups for n in range(groups + 1)]
    return [pieces[begin:end] for begin, end in itertools.pairwise(bounds)]

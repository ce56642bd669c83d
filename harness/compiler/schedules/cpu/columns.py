"""Gathers the columns of a convolution's image (im2col) as panels of the streamed operand of a product.

    column[k, pixel] = image[channel, y, x]     k = (channel, kernel row, kernel column)

A panel is gathered line by line of the kernel and of the image. Neighbouring pixels of the result read neighbouring
pixels of the image, or every second one with a stride: then vectors are loaded, and shuffled with a stride.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import registers, view
from harness.compiler.schedules.cpu.blocking import Extents
from harness.compiler.schedules.cpu.contraction import Packer, across
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.packing import Fill, Pack, Put, Read
from harness.compiler.schedules.cpu.tile import SHORTEST_RUN, Tile
from harness.compiler.schedules.cpu.window import Window

_LONGEST_STRIDE = 4
"""So many vectors are loaded for one at most; beyond it elements are loaded one by one."""


def pixels(extents: Extents) -> Packer:
    """Returns how the columns of an image are packed whose pixels are the columns of a product."""

    def read(image: T.Buffer) -> Read:
        columns = view(image, extents.batch, extents.depth, extents.columns)
        return lambda b, j, k: columns[b, k, j]

    return across("right", extents, read, neighbours=True)


def gather(window: Window) -> Packer:
    """Returns how the columns of an image [batch, channels, height, width] are packed; padding reads as zero."""

    def pack(image: T.Buffer, tile: Tile, micro_kernel: MicroKernel) -> Pack:
        if _keeps_lines(window) or tile.run(window.result[3]) < SHORTEST_RUN or window.strides[1] > _LONGEST_STRIDE:
            return _gather_panel(window, tile, image, micro_kernel)
        return _gather_runs(window, tile, image, micro_kernel)

    return pack


def _keeps_lines(window: Window) -> bool:
    """Returns whether a panel of neighbouring pixels reads neighbouring pixels, across the ends of lines too."""
    return window.strides == (1, 1) and window.result[3] == window.image[3]


def _gather_panel(window: Window, tile: Tile, image: T.Buffer, micro_kernel: MicroKernel) -> Pack:
    """Packs a panel that may begin and end anywhere; the last pixel is repeated."""
    height, width = window.image[2:]
    (kernel_height, kernel_width), out_width = window.kernel, window.result[3]
    matrices = window.image[0] * window.groups
    planes = view(image, matrices, window.channels, height, width)
    flat = view(image, matrices, window.channels, height * width)
    taps = math.prod(window.kernel)
    zero = T.const(0, micro_kernel.dtype)

    def of_channels(read: Callable[[T.Index], T.Expr], first: T.Index) -> T.Expr:
        return micro_kernel.pack(read, first, window.channels // micro_kernel.terms)

    def pack(b: T.Index, first: T.Index) -> Fill:
        tops = registers((tile.columns,), "int32")
        lefts = registers((tile.columns,), "int32")
        inside = T.alloc_buffer((taps, tile.columns), "int32")
        with T.serial(0, tile.columns) as j:
            pixel = T.Bind(T.min(first + j, window.pixels - 1))
            T.buffer_store(tops, pixel // out_width * window.strides[0] - window.padding[0], [j])
            T.buffer_store(lefts, pixel % out_width * window.strides[1] - window.padding[1], [j])
        with T.serial(0, kernel_height) as ky, T.serial(0, kernel_width) as kx, T.serial(0, tile.columns) as j:
            y, x = tops[j] + ky * window.dilation[0], lefts[j] + kx * window.dilation[1]
            within = T.all(y >= 0, y < height, x >= 0, x < width)
            T.buffer_store(inside, T.Cast("int32", within), [ky * kernel_width + kx, j])

        def fill(put: Put, start: T.Index, count: T.Index) -> None:
            with T.serial(0, count) as k:
                c, tap = T.Bind((start + k) // taps), T.Bind((start + k) % taps)
                down = T.Bind(tap // kernel_width * window.dilation[0])
                right = T.Bind(tap % kernel_width * window.dilation[1])

                def element() -> None:
                    with T.serial(0, tile.columns) as j:
                        y, x = tops[j] + down, lefts[j] + right
                        value = of_channels(lambda channel: planes[b, channel, y, x], c)
                        put(k, j, T.if_then_else(inside[tap, j] != 0, value, zero))

                def neighbours(j: T.Index) -> None:
                    value = of_channels(lambda channel: flat[b, channel, pixel + j], c)
                    put(k, j, T.Select(inside[tap, j] != 0, value, zero))

                if not _keeps_lines(window):
                    element()
                    return
                pixel = T.Bind(first + (down - window.padding[0]) * width + right - window.padding[1])
                with T.If(T.all(pixel >= 0, pixel + tile.columns <= height * width)):
                    with T.Then():
                        for_each_vector(tile.columns, tile.lanes, neighbours)
                    with T.Else():
                        element()

        return fill

    return pack


def _gather_runs(window: Window, tile: Tile, image: T.Buffer, micro_kernel: MicroKernel) -> Pack:
    """Packs a panel vector by vector: each is a run of pixels in one line of the result."""
    height, width = window.image[2:]
    (_, kernel_width), (down_stride, stride), out_width = window.kernel, window.strides, window.result[3]
    planes = view(image, window.image[0] * window.groups, window.channels, height, width)
    taps, run = math.prod(window.kernel), tile.run(out_width)
    apart = window.channels // micro_kernel.terms
    span = stride * (run - 1) + 1

    def pack(b: T.Index, first: T.Index) -> Fill:
        tops, lefts = (registers((tile.columns // run,), "int32") for _ in range(2))
        with T.serial(0, tile.columns // run) as v:
            pixel = T.Bind(first + v * run)
            T.buffer_store(tops, pixel // out_width * down_stride - window.padding[0], [v])
            T.buffer_store(lefts, pixel % out_width * stride - window.padding[1], [v])

        def fill(put: Put, start: T.Index, count: T.Index) -> None:
            with T.serial(0, count) as k, T.serial(0, tile.columns // run) as v:
                c, tap = T.Bind((start + k) // taps), T.Bind((start + k) % taps)
                y = T.Bind(tops[v] + tap // kernel_width * window.dilation[0])
                x = T.Bind(lefts[v] + tap % kernel_width * window.dilation[1])

                def element() -> None:
                    with T.serial(0, run) as j:
                        index = x + j * stride
                        value = micro_kernel.pack(lambda channel: planes[b, channel, y, index], c, apart)
                        within = T.all(y >= 0, y < height, index >= 0, index < width)
                        put(k, v * run + j, T.if_then_else(within, value, T.const(0, micro_kernel.dtype)))

                with T.If(T.all(y >= 0, y < height, x >= 0, x + span <= width)):
                    with T.Then():
                        parts = [registers((run,)) for _ in range(micro_kernel.terms)]
                        for n, part in enumerate(parts):
                            values = _every(planes, [b, c + n * apart, y], x, run, stride)
                            T.buffer_store(part, values, [T.Ramp(0, 1, run)])
                        with T.vectorized(0, run) as j:
                            put(k, v * run + j, micro_kernel.b.encode([part[j] for part in parts]))
                    with T.Else():
                        element()

        return fill

    return pack


def _every(planes: T.Buffer, line: list[T.Index], first: T.Index, count: int, stride: int) -> T.Expr:
    """Returns a vector of `count` elements of a line, `stride` apart; nothing beyond the last of them is read."""
    last = (stride - 1) * (count - 1)
    begins = [n * count for n in range(stride - 1)] + [last]
    loaded = [planes[(*line, T.Ramp(first + begin, 1, count))] for begin in begins]
    if stride == 1:
        return loaded[0]
    lanes_kept = [n * stride for n in range(count)]
    return T.Shuffle(loaded, [index if index < last else (stride - 1) * count + index - last for index in lanes_kept])

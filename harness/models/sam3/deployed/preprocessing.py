"""Builds the compiled entry point `preprocess` from an 8-bit RGB image of any size to the model's input.

The result is bitwise that of upstream's `Sam3Processor.transform` on the CPU. torchvision resizes 8-bit images with
PyTorch's fixed-point resampling (`_upsample_bilinear2d_aa`): each output pixel is a weighted mean of neighbouring input
pixels under a triangle as wide as two output pixels (or two input pixels, where the image is enlarged), along x first,
rounded to 8 bits, then along y. The weights are fractions with as many bits as fit 16-bit integers.

PyTorch computes the weights in float64 before it rounds them. They are ratios of integers: with sizes n → N and
M = max(n, N), pixel k has at output i the weight a(k) / Σa, a(k) = max(0, 2M - |(2k + 1)N - (2i + 1)n|). In integers
they are exact, on any device. They differ from PyTorch's only where PyTorch's float64 misses a tie of the exact ratio,
which no size below 9000 has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import Argument, ceil_div, fp32, prim_func, registers, scalar, variable
from harness.runtime.sam3.images import RESOLUTION

Fma = Callable[[T.Index, T.Index, T.Index], T.Expr]
"""x · y + z, rounded once."""

NAME = "preprocess"

_CHANNELS = 4
"""Bytes per pixel between the two passes: a pixel is one 32-bit word."""
_ROWS = 8
"""Input rows that one task resamples, so that their sums fill vectors of 32-bit integers."""
_LANES = 16
LONGEST = 22
"""The largest number of fractional bits of PyTorch's weights."""
_BLOCK = 63
"""Output positions whose weights one task computes; divides RESOLUTION."""
_WINDOW = 4
"""Fields of an output position: first pixel, number of pixels, bits that its largest weight allows, Σa."""


def preprocess_module() -> tvm.IRModule:
    """Builds the function `preprocess` and its kernels, ready for `harness.compiler.schedules.common.vm.lower_to_vm`.

    The function takes `image`, uint8 [h, w, 3] with any h and w from 1 on, and returns fp32 [1, 3, 1008, 1008].
    """
    height, width = T.Var("h", "int64"), T.Var("w", "int64")
    image = relax.Var("image", relax.TensorType([height, width, 3], "uint8"))
    builder = relax.BlockBuilder()
    with builder.function(NAME, [image]):
        rows = _weights(builder, image, 0, height)
        columns = _weights(builder, image, 1, width)
        shape = [height, RESOLUTION, _CHANNELS]
        narrow = emit_call(builder, "resample_rows", _horizontal(), [image, *columns], (shape, "uint8"))
        shape = [1, 3, RESOLUTION, RESOLUTION]
        pixels = emit_call(builder, "resample_columns", _vertical(), [narrow, *rows], (shape, "float32"))
        builder.emit_func_output(pixels)
    return builder.get()


def _weights(builder: relax.BlockBuilder, image: relax.Var, axis: int, size: T.Var) -> list[relax.Expr]:
    """Emits the windows and weights of one axis."""
    # The triangle's base has this many pixels, without its ends.
    taps = T.ceildiv(T.max(size, RESOLUTION) * 2, RESOLUTION)
    types = ([_WINDOW, RESOLUTION], "int64"), ([RESOLUTION, taps], "int16")
    pair = emit_call(builder, f"resampling_weights_{'yx'[axis]}", _table(axis), [image], *types)
    return [builder.emit(relax.TupleGetItem(pair, index)) for index in range(2)]


def emit_call(
    builder: relax.BlockBuilder,
    name: str,
    kernel: T.PrimFunc,
    arguments: Sequence[relax.Expr],
    *types: tuple[Sequence[object], str],
) -> relax.Var:
    """Adds a kernel under a name and emits its call, whose results have the given shapes and dtypes."""
    results = [relax.TensorType(*result) for result in types]
    call = relax.call_tir(builder.add_func(kernel, name), arguments, results if len(results) > 1 else results[0])
    return builder.emit(call)


def _table(axis: int) -> T.PrimFunc:
    """Builds the windows int64 [4, 1008] and weights int16 [1008, taps] for the size of one axis of the image."""
    shape = (T.Var("h", "int64"), T.Var("w", "int64"), 3)
    size = shape[axis]
    taps = T.Var("taps", "int64")

    def body(_image: T.Buffer, windows: T.Buffer, weights: T.Buffer) -> None:
        reach = T.max(size, RESOLUTION) * 2

        def numerator(i: T.Index, k: T.Index) -> T.Expr:
            return reach - T.abs((k * 2 + 1) * RESOLUTION - (i * 2 + 1) * size)

        with T.parallel(T.const(0, "int64"), RESOLUTION) as i:
            center = scalar((i * 2 + 1) * size, "int64")
            first_pixel = scalar(T.max(T.floordiv(center - reach - RESOLUTION, 2 * RESOLUTION) + 1, 0), "int64")
            end_pixel = scalar(T.min(T.ceildiv(center + reach - RESOLUTION, 2 * RESOLUTION), size), "int64")
            total = variable(0, "int64")
            largest = variable(0, "int64")
            with T.serial(T.const(0, "int64"), end_pixel - first_pixel) as j:
                a = scalar(numerator(i, first_pixel + j), "int64")
                T.buffer_store(total, total[0] + a, [0])
                T.buffer_store(largest, T.max(largest[0], a), [0])
            bits = variable(0, "int64")
            # PyTorch adds a bit while ⌊½ + largest weight · 2^(bits + 1)⌋ < 2^15.
            with T.serial(0, LONGEST) as b:
                fits = (largest[0] << T.Cast("int64", b + 2)) < total[0] * 65535
                T.buffer_store(bits, bits[0] + T.Cast("int64", fits), [0])
            for row, value in enumerate((first_pixel, end_pixel - first_pixel, bits[0], total[0])):
                T.buffer_store(windows, value, [row, i])

        with T.parallel(T.const(0, "int64"), RESOLUTION // _BLOCK) as block:
            shift = _shared_bits(windows)
            with T.serial(0, _BLOCK) as position:
                pixel = block * _BLOCK + position
                weight_sum = scalar(windows[3, pixel], "int64")
                with T.serial(T.const(0, "int64"), taps) as j:
                    # ⌊½ + a / Σa · 2^bits⌋
                    rounded = T.floordiv(
                        (numerator(pixel, windows[0, pixel] + j) << (shift + 1)) + weight_sum, weight_sum * 2
                    )
                    inside = j < windows[1, pixel]
                    weight = T.Select(inside, rounded, T.const(0, "int64"))
                    T.buffer_store(weights, T.Cast("int16", weight), [pixel, j])

    arguments = [
        Argument("image", shape, "uint8"),
        Argument("windows", (_WINDOW, RESOLUTION), "int64"),
        Argument("weights", (RESOLUTION, taps), "int16"),
    ]
    return prim_func("resampling_weights", arguments, body)


def _horizontal() -> T.PrimFunc:
    """Builds the pass from uint8 [h, w, 3] to uint8 [h, 1008, 4], whose fourth channel is undefined.

    A task copies a few rows into a strip [pixel, row, channel], so that one vector holds the same pixel of all rows.
    """
    height, width, taps = T.Var("h", "int64"), T.Var("w", "int64"), T.Var("taps", "int64")
    lanes = _ROWS * _CHANNELS

    def body(image: T.Buffer, windows: T.Buffer, weights: T.Buffer, narrow: T.Buffer) -> None:
        flat = T.decl_buffer((height * width * 3,), "uint8", data=image.data)
        with T.parallel(T.const(0, "int64"), T.ceildiv(height, _ROWS)) as block:
            # Every window is as long as the longest, with zero weights beyond its end.
            strip = T.alloc_buffer(((width + taps) * lanes,), "uint8")
            # Rows beyond the last row repeat it.
            rows = [scalar(T.min(block * _ROWS + r, height - 1), "int64") for r in range(_ROWS)]
            with T.serial(T.const(0, "int64"), width - 1) as x:
                for r, row in enumerate(rows):
                    with T.vectorized(0, _CHANNELS) as c:
                        T.buffer_store(strip, flat[(row * width + x) * 3 + c], [x * lanes + r * _CHANNELS + c])
            # No byte after the last pixel may be read.
            last_pixel = width - 1
            for r, row in enumerate(rows):
                for channel in range(3):
                    place = last_pixel * lanes + r * _CHANNELS + channel
                    T.buffer_store(strip, image[row, last_pixel, channel], [place])
                T.buffer_store(strip, T.const(0, "uint8"), [last_pixel * lanes + r * _CHANNELS + 3])
            bits = _shared_bits(windows)
            with T.serial(T.const(0, "int64"), RESOLUTION) as x:
                first_pixel = scalar(windows[0, x], "int64")
                total = registers((lanes,), "int32")
                with T.vectorized(0, lanes) as lane:
                    T.buffer_store(total, _half(bits), [lane])
                with T.serial(T.const(0, "int64"), taps) as j, T.vectorized(0, lanes) as lane:
                    T.buffer_store(
                        total, total[lane] + _term(weights[x, j], strip[(first_pixel + j) * lanes + lane]), [lane]
                    )
                rounded = registers((lanes,), "uint8")
                with T.vectorized(0, lanes) as lane:
                    T.buffer_store(rounded, _byte(total[lane], bits), [lane])
                for r, row in enumerate(rows):
                    with T.vectorized(0, _CHANNELS) as c:
                        T.buffer_store(narrow, rounded[r * _CHANNELS + c], [row, x, c])

    arguments = [
        Argument("image", (height, width, 3), "uint8"),
        Argument("windows", (_WINDOW, RESOLUTION), "int64"),
        Argument("weights", (RESOLUTION, taps), "int16"),
        Argument("narrow", (height, RESOLUTION, _CHANNELS), "uint8"),
    ]
    return prim_func("resample_rows", arguments, body)


def _vertical() -> T.PrimFunc:
    """Builds the pass from uint8 [h, 1008, 4] to fp32 [1, 3, 1008, 1008], normalized to -1 … 1."""
    height, taps = T.Var("h", "int64"), T.Var("taps", "int64")
    length = RESOLUTION * _CHANNELS
    chunk = 4 * _LANES

    def body(narrow: T.Buffer, windows: T.Buffer, weights: T.Buffer, pixels: T.Buffer) -> None:
        flat = T.decl_buffer((height * length,), "uint8", data=narrow.data)
        with T.parallel(T.const(0, "int64"), RESOLUTION) as y:
            line = T.alloc_buffer((length,), "uint8")
            bits = _shared_bits(windows)
            first_pixel = scalar(windows[0, y], "int64")
            with T.serial(T.const(0, "int64"), ceil_div(length, chunk)) as part:
                total = registers((chunk,), "int32")
                pieces = range(0, chunk, _LANES)
                for start in pieces:
                    with T.vectorized(0, _LANES) as lane:
                        T.buffer_store(total, _half(bits), [start + lane])
                with T.serial(T.const(0, "int64"), windows[1, y]) as j:
                    for start in pieces:
                        with T.vectorized(0, _LANES) as lane:
                            value = flat[(first_pixel + j) * length + part * chunk + start + lane]
                            T.buffer_store(total, total[start + lane] + _term(weights[y, j], value), [start + lane])
                for start in pieces:
                    with T.vectorized(0, _LANES) as lane:
                        T.buffer_store(line, _byte(total[start + lane], bits), [part * chunk + start + lane])
            for c in range(3):
                with T.serial(T.const(0, "int64"), RESOLUTION // _LANES) as v, T.vectorized(0, _LANES) as lane:
                    x = v * _LANES + lane
                    T.buffer_store(pixels, normalized(line[x * _CHANNELS + c]), [0, c, y, x])

    arguments = [
        Argument("narrow", (height, RESOLUTION, _CHANNELS), "uint8"),
        Argument("windows", (_WINDOW, RESOLUTION), "int64"),
        Argument("weights", (RESOLUTION, taps), "int16"),
        Argument("pixels", (1, 3, RESOLUTION, RESOLUTION), "float32"),
    ]
    return prim_func("resample_columns", arguments, body)


def _shared_bits(windows: T.Buffer) -> T.Expr:
    """Emits the number of bits of every weight of an axis, which the largest weight allows."""
    bits = variable(LONGEST, "int64")
    with T.serial(T.const(0, "int64"), RESOLUTION) as i:
        T.buffer_store(bits, T.min(bits[0], windows[2, i]), [0])
    return bits[0]


def _half(bits: T.Expr) -> T.Expr:
    """Returns ½ with the given number of fractional bits."""
    return T.const(1, "int32") << (T.Cast("int32", bits) - 1)


def _term(weight: T.Expr, value: T.Expr) -> T.Expr:
    """Multiplies a 16-bit weight and an 8-bit value, in widths that LLVM sees and may use."""
    return T.Cast("int32", weight) * T.Cast("int32", value)


def _byte(total: T.Expr, bits: T.Expr) -> T.Expr:
    """Returns the integer part of a sum, as 8 bits."""
    return T.Cast("uint8", T.min(total >> T.Cast("int32", bits), 255))


def normalized(value: T.Expr, fma: Fma = T.fma) -> T.Expr:
    """Computes (v · (1/255) - ½) / ½ as torchvision does: with the product rounded to fp32."""
    # Compilers must keep the sum with 0, which prevents contraction with the subtraction.
    scaled = fma(T.Cast("float32", value), fp32(1.0 / 255.0), fp32(0.0))
    return (scaled - fp32(0.5)) * fp32(2.0)

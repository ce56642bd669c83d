"""Pools boxes (`roi_align`): one task per box and vector of channels, whose samples have the same places.

Values that are used again are local variables; TVM's simplifier fails on a `T.Bind` of each (`test_cpu_roi_align.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, call, default, static_shape
from harness.compiler.schedules.common.kernel import Argument, fp32, prim_func, registers, scalar, view
from harness.compiler.schedules.common.kernel_info import KernelInfo, Kind
from harness.compiler.schedules.cpu.emit import for_each_vector

_CHANNELS = 16
"""Largest number of channels of a task, a power of two; they share the computations of each sample."""


@dataclass(frozen=True)
class Pooling:
    """The attributes of `relax.vision.roi_align`.

    Attributes:
        rows, columns: Bins of a box.
        scale: Factor of the coordinates.
        samples: In each direction of a bin; 0 or less for as many as it has pixels, rounded up.
        aligned: Whether a box may be smaller than a pixel; moving it by half a pixel is the caller's.
    """

    rows: int
    columns: int
    scale: float
    samples: int
    aligned: bool


def roi_align_kernel(image: tuple[int, ...], boxes: int, pooling: Pooling) -> T.PrimFunc:
    """Builds the mean of bilinear samples of [n, c, h, w] in each bin of boxes (image index, x0, y0, x1, y1).

    A bin without samples gives 0, samples further than a pixel outside count as 0. Source:
    torchvision/csrc/ops/cpu/roi_align_kernel.cpp.

    Args:
        image: Its shape, [n, c, h, w].
        boxes: Number of boxes.
        pooling: Attributes of the pooling.
    """
    n, channels, height, width = image
    lanes = math.gcd(channels, _CHANNELS)
    groups = channels // lanes
    shape = (boxes, channels, pooling.rows, pooling.columns)

    def body(data: T.Buffer, box: T.Buffer, out: T.Buffer) -> None:
        pixels = view(data, n, channels, height * width)
        with T.parallel(0, boxes * groups) as task:
            b, first = task // groups, task % groups * lanes
            image_number = T.Bind(T.cast(box[b, 0], "int32"))
            x_start, x_bin, x_samples = _bins(box[b, 1], box[b, 3], pooling.columns, pooling)
            y_start, y_bin, y_samples = _bins(box[b, 2], box[b, 4], pooling.rows, pooling)
            count = scalar(T.cast(T.max(x_samples * y_samples, 1), "float32"))
            with T.serial(0, pooling.rows) as i, T.serial(0, pooling.columns) as j:
                total = registers((lanes,))
                for_each_vector(lanes, lanes, lambda c: T.buffer_store(total, fp32(0.0), [c]))
                with T.serial(0, y_samples) as s:
                    y = scalar(_position(y_start, y_bin, i, s, y_samples))
                    above, below, down = _neighbours(y, height)
                    with T.serial(0, x_samples) as t:
                        x = scalar(_position(x_start, x_bin, j, t, x_samples))
                        left, right, along = _neighbours(x, width)

                        def add(c: T.Index) -> None:
                            def pixel(row: T.Index, column: T.Index) -> T.Expr:
                                return pixels[image_number, first + c, row * width + column]

                            upper = (1 - down) * (1 - along) * pixel(above, left) + (1 - down) * along * pixel(
                                above, right
                            )
                            lower = down * (1 - along) * pixel(below, left) + down * along * pixel(below, right)
                            T.buffer_store(total, total[c] + (upper + lower), [c])

                        with T.If(T.all(y >= -1, y <= height, x >= -1, x <= width)), T.Then():
                            for_each_vector(lanes, lanes, add)
                for_each_vector(lanes, lanes, lambda c: T.buffer_store(out, total[c] / count, [b, first + c, i, j]))

    arguments = [Argument("data", image), Argument("boxes", (boxes, 5)), Argument("out", shape)]
    extents = {"boxes": boxes, "channels": channels, "rows": pooling.rows, "columns": pooling.columns}
    info = KernelInfo(Kind.KERNEL, "vision.roi_align", extents=extents, tile={"channels": lanes})
    return prim_func("roi_align", arguments, body, info)


def _bins(start: T.Index, end: T.Index, count: int, pooling: Pooling) -> tuple[T.Expr, T.Expr, T.Expr]:
    """Returns, for one axis, the start of the first bin, the size of a bin, and the number of samples in it."""
    begin = scalar(start * fp32(pooling.scale))
    size: T.Index = end * fp32(pooling.scale) - begin
    if not pooling.aligned:
        size = T.max(size, fp32(1.0))
    bin_size = scalar(size / fp32(count))
    is_fixed = pooling.samples > 0
    return (
        begin,
        bin_size,
        T.const(pooling.samples, "int32") if is_fixed else T.Bind(T.cast(T.ceil(bin_size), "int32")),
    )


def _position(start: T.Index, size: T.Index, index: T.Index, sample: T.Index, samples: T.Index) -> T.Expr:
    """Returns the position of a sample in the bin of that index."""
    middle = T.cast(sample, "float32") + fp32(0.5)
    return start + T.cast(index, "float32") * size + middle * size / T.cast(samples, "float32")


def _neighbours(position: T.Index, extent: int) -> tuple[T.Expr, T.Expr, T.Expr]:
    """Returns the pixels before and after a position, clipped to the image, and the fraction between them."""
    inside = scalar(T.min(T.max(position, fp32(0.0)), fp32(extent - 1)))
    low = T.Bind(T.max(T.min(T.cast(inside, "int32"), extent - 1), 0))
    high = T.Bind(T.min(low + 1, extent - 1))
    return low, high, scalar(inside - T.cast(low, "float32"))


def _legalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    data, boxes = node.args
    image, boxes_shape, attributes = static_shape(data), static_shape(boxes), node.attrs
    if (
        not image
        or not boxes_shape
        or 0 in image + boxes_shape
        or (attributes.layout, attributes.mode) != ("NCHW", "avg")
    ):
        return default(bb, node)
    rows, columns = (int(size) for size in attributes.pooled_size)
    pooling = Pooling(
        rows, columns, float(attributes.spatial_scale), int(attributes.sample_ratio), bool(attributes.aligned)
    )
    function = roi_align_kernel(image, boxes_shape[0], pooling)
    return call(bb, "roi_align", function, [data, boxes])


LEGALIZE: dict[str, Legalize] = {"relax.vision.roi_align": _legalize}
"""The legalization of fp32 box pooling, by operator."""

"""Describes the geometry of a convolution over [batch, channels, height, width]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import ir

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import static_shape
from harness.compiler.schedules.cpu.blocking import Extents
from harness.compiler.schedules.cpu.epilogue import ResultLayout


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution.

    Attributes:
        image: Input shape.
        result: Output shape.
        kernel: Kernel height and width.
        strides, dilation: Per axis.
        padding: Rows above and columns left of the image.
        groups: Channel groups.
    """

    image: tuple[int, ...]
    result: tuple[int, ...]
    kernel: tuple[int, int]
    strides: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def channels(self) -> int:
        """Returns the number of input channels per group."""
        return self.image[1] // self.groups

    @property
    def filters(self) -> int:
        """Returns the number of output channels per group."""
        return self.result[1] // self.groups

    @property
    def depth(self) -> int:
        """Returns the number of terms per output element."""
        return self.channels * math.prod(self.kernel)

    @property
    def pixels(self) -> int:
        """Returns the number of output pixels per image."""
        return self.result[2] * self.result[3]

    @property
    def weight(self) -> tuple[int, ...]:
        """Returns the shape of the filters."""
        return self.result[1], self.channels, *self.kernel

    @property
    def extents(self) -> Extents:
        """Returns the product of the filters and the columns of the image, for each image and group."""
        return Extents(self.image[0] * self.groups, self.filters, self.pixels, self.depth)

    @property
    def sizes(self) -> dict[str, int]:
        """Returns by name the extents of the image, of all filters with the channels of each, and of the kernel."""
        (batch, _, height, width), (kernel_height, kernel_width) = self.image, self.kernel
        return {
            "batch": batch,
            "filters": self.result[1],
            "channels": self.channels,
            "kernel_height": kernel_height,
            "kernel_width": kernel_width,
            "height": height,
            "width": width,
        }

    @property
    def pointwise(self) -> bool:
        """Returns whether every output pixel reads only the input pixel at its own place."""
        return self.kernel == (1, 1) and self.strides == (1, 1) and self.result[2:] == self.image[2:]

    @property
    def covers_image(self) -> bool:
        """Returns whether there is one output pixel, which reads every input pixel once."""
        whole = self.result[2:] == (1, 1) and self.kernel == self.image[2:] and self.padding == (0, 0)
        return whole and self.dilation == (1, 1) and self.groups == 1

    @property
    def layout(self) -> ResultLayout:
        """Returns the layout of the result for a product filters × pixels per image and group."""
        return image_layout(self.result, self.groups)


def image_layout(shape: tuple[int, ...], groups: int = 1) -> ResultLayout:
    """Returns where (image and group, channel of the group, pixel) lies in [batch, channels, height, width]."""
    channels, width = shape[1] // groups, shape[3]
    pixels = shape[2] * width

    def flat(b: T.Index, i: T.Index, j: T.Index) -> T.Index:
        return (b * channels + i) * pixels + j

    def coordinates(b: T.Index, i: T.Index, j: T.Index) -> list[T.Index]:
        return [b // groups, b % groups * channels + i, j // width, j % width]

    return ResultLayout(shape, flat, coordinates, frozenset({0, 1}))


def shapes_of(conv: ir.Call, kernel_layout: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Returns the shapes of image, weight and result of a convolution over [batch, channels, height, width] in fp32.

    Args:
        conv: The call.
        kernel_layout: The required layout of the weight.

    Returns:
        None where a shape is not static or empty, or where it lies in another way.
    """
    attributes = conv.attrs
    image, weight, result = static_shape(conv.args[0]), static_shape(conv.args[1]), static_shape(conv)
    layouts = (attributes.data_layout, attributes.kernel_layout, attributes.out_layout)
    if layouts != ("NCHW", kernel_layout, "NCHW") or image is None or weight is None or result is None:
        return None
    return None if 0 in image + result else (image, weight, result)


def pair(values: Sequence[int]) -> tuple[int, int]:
    """Returns an attribute of two numbers."""
    return int(values[0]), int(values[1])

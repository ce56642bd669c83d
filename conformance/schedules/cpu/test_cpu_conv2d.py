"""Convolutions on the CPU: every geometry that SAM 3 has and arbitrary ones around them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn import functional
from tvm import relax

from conformance.support.convolutions import AROUND, Geometry, convolutions, filters, of_upsampled
from conformance.support.examples import examples
from conformance.support.kernels import call_of, functions_of, hold, hold_result, lowered, machine_of
from conformance.support.operators import normal

op = relax.op
few = examples(15)


@few
@given(convolutions(batch=3, groups=[1, 1, 2, 4], inner=[1, 3, 8], height=40, width=70))
def test_any_convolution(convolution: tuple[np.ndarray, np.ndarray, Geometry]) -> None:
    x, weight, at = convolution
    hold(
        at.conv2d,
        lambda x, w: functional.conv2d(x, w, None, at.stride, at.padding, at.dilation, at.groups),
        [x],
        [weight],
    )


@pytest.mark.parametrize(
    ("channels", "size", "outer", "kernel", "stride", "padding"),
    [
        (3, (56, 70), 64, 14, 14, 0),
        (64, (36, 36), 48, 3, 1, 1),
        (64, (20, 72), 48, 3, 1, 1),
        (32, (4, 288), 48, 3, 1, 1),
        (256, (9, 33), 64, 1, 1, 0),
        (64, (7, 7), 48, 7, 1, 0),
        (1, (64, 192), 4, 3, 2, 1),
        (4, (32, 96), 16, 3, 2, 1),
        (16, (40, 144), 64, 3, 2, 1),
        (1, (48, 96), 4, 2, 2, 0),
    ],
    ids=["patches", "3x3-36", "3x3-72", "3x3-288", "1x1", "7x7-whole", "mask-192", "mask-96", "mask-144", "prompt"],
)
def test_shapes_of_sam3_with_bias_and_relu(
    channels: int, size: tuple[int, int], outer: int, kernel: int, stride: int, padding: int
) -> None:
    def operator(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        y = op.nn.conv2d(x, w, (stride, stride), (padding,) * 4)
        return op.nn.relu(op.add(y, op.reshape(b, [1, outer, 1, 1])))

    inputs, weights = [normal((3, channels, *size))], [filters(outer, channels, kernel, kernel), normal((outer,), 2)]
    hold(operator, lambda x, w, b: torch.relu(functional.conv2d(x, w, b, stride, padding)), inputs, weights, large=True)


@few
@given(data=st.data())
def test_panels_of_pixels_in_lines_of_whole_vectors(data: st.DataObject) -> None:
    """The width of the result is a multiple of four, so that vectors of the image are loaded and shuffled."""
    stride, dilation = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
    kernel, padding = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 3))
    pixels = 4 * data.draw(st.integers(1, 20))
    width = (pixels - 1) * stride + (kernel - 1) * dilation + 1 - 2 * padding + data.draw(st.integers(0, stride - 1))
    height = data.draw(st.integers((kernel - 1) * dilation + 1, 20))
    assume(width > 0)
    channels, outer = data.draw(st.sampled_from([1, 2, 3, 8])), data.draw(st.sampled_from([1, 4, 17]))
    hold(
        lambda x, w: op.nn.conv2d(x, w, (stride, stride), (padding,) * 4, (dilation, dilation)),
        lambda x, w: functional.conv2d(x, w, None, stride, padding, dilation),
        [normal((data.draw(st.integers(1, 2)), channels, height, width))],
        [filters(outer, channels, kernel, kernel)],
    )


@pytest.mark.smoke
def test_bias_activation_and_residual_are_fused() -> None:
    def operator(x: relax.Expr, r: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.add(r, op.nn.gelu(op.add(op.nn.conv2d(x, w, padding=(1, 1, 1, 1)), b)))

    def reference(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return r + functional.gelu(functional.conv2d(x, w, None, padding=1) + b)

    inputs = [normal((2, 8, 12, 20)), normal((2, 24, 12, 20), 3)]
    weights = [filters(24, 8, 3, 3), normal((24, 1, 1), 2)]
    hold(operator, reference, inputs, weights)
    assert len(functions_of(lowered(operator, inputs, weights))) == 2


def test_an_operand_per_pixel_is_added_after_the_convolution() -> None:
    hold(
        lambda x, p, w: op.add(op.nn.conv2d(x, w), p),
        lambda x, p, w: functional.conv2d(x, w) + p,
        [normal((2, 8, 5, 7)), normal((1, 1, 5, 7), 3)],
        [filters(6, 8, 1, 1)],
    )


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [(7, 1, 3), pytest.param(3, 2, 1, marks=pytest.mark.smoke), (2, 1, 0), (2, 1, 4), (3, 5, 0)],
)
@pytest.mark.parametrize("size", [(19, 37), (3, 3), (9, 72), (4, 140)], ids=str)
def test_depthwise(kernel: int, stride: int, padding: int, size: tuple[int, int]) -> None:
    def operator(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.add(op.nn.conv2d(x, w, (stride, stride), (padding,) * 4, groups=12), b)

    hold(
        operator,
        lambda x, w, b: functional.conv2d(x, w, None, stride, padding, 1, 12) + b,
        [normal((2, 12, *size))],
        [filters(12, 1, kernel, kernel), normal((1, 12, 1, 1), 2)],
    )


@pytest.mark.parametrize("size", [(1, 1), (5, 7), (9, 36), (18, 72)])
def test_transposed_2x2_stride_2(size: tuple[int, int]) -> None:
    def operator(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.nn.gelu(op.add(op.nn.conv2d_transpose(x, w, (2, 2)), op.reshape(b, [1, 24, 1, 1])))

    hold(
        operator,
        lambda x, w, b: functional.gelu(functional.conv_transpose2d(x, w, b, 2)),
        [normal((2, 64, *size))],
        [normal((64, 24, 2, 2), 1, scale=0.125), normal((24,), 2)],
    )


@few
@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    size=st.tuples(st.integers(1, 9), st.sampled_from([3, 4, 8, 20, 48, 72])),
    channels=st.sampled_from([1, 3, 64]),
    filters=st.sampled_from([1, 4, 24]),
)
def test_patches_of_any_size_with_a_residual(
    kernel: tuple[int, int], size: tuple[int, int], channels: int, filters: int
) -> None:
    """The lines of a patch are put together where lines of the image have whole vectors."""
    result = (2, filters, size[0] * kernel[0], size[1] * kernel[1])
    hold(
        lambda x, r, w, b: op.nn.gelu(op.add(op.add(op.nn.conv2d_transpose(x, w, kernel), b), r)),
        lambda x, r, w, b: functional.gelu(functional.conv_transpose2d(x, w, None, kernel) + b + r),
        [normal((2, channels, *size)), normal(result, 3)],
        [normal((channels, filters, *kernel), 1, scale=channels**-0.5), normal((filters, 1, 1), 2)],
    )


@pytest.mark.parametrize(
    ("stride", "padding", "output_padding", "groups"), [(1, 0, 0, 1), (2, 1, 1, 1), (3, 0, 0, 2), (2, 0, 1, 1)]
)
def test_other_transposed_convolutions(stride: int, padding: int, output_padding: int, groups: int) -> None:
    hold(
        lambda x, w: op.nn.conv2d_transpose(
            x, w, (stride, stride), (padding,) * 4, (output_padding, output_padding), groups=groups
        ),
        lambda x, w: functional.conv_transpose2d(x, w, None, stride, padding, output_padding, groups),
        [normal((2, 8, 5, 6))],
        [normal((8, 4, 3, 3), 1, scale=0.12)],
    )


def test_padding_reads_nothing_outside() -> None:
    """Special values at the borders spread as far as the kernel reaches, and no further."""
    x = normal((1, 4, 9, 40))
    x[0, 1, 0, 0], x[0, 2, -1, -1] = np.nan, np.inf
    actual = hold(
        lambda x, w: op.nn.conv2d(x, w, padding=(1, 1, 1, 1)),
        lambda x, w: functional.conv2d(x, w, None, padding=1),
        [x],
        [filters(5, 4, 3, 3)],
    )
    assert np.isfinite(actual[:, :, 2:7]).all()


# --- minimal filtering: dense 3 × 3 of many channels ---

MANY_CHANNELS = {"batch": st.integers(1, 2), "inner": st.sampled_from([32, 40]), "outer": st.sampled_from([32, 45])}


def pads(padding: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Relax's order (top, left, bottom, right) in that of `torch.nn.functional.pad`."""
    top, left, bottom, right = padding
    return left, right, top, bottom


@few
@given(
    **MANY_CHANNELS,
    size=st.tuples(st.integers(1, 20), st.integers(1, 70)),
    padding=st.tuples(*[st.integers(0, 3)] * 4),
)
def test_any_3x3_convolution_of_many_channels(
    batch: int, inner: int, outer: int, size: tuple[int, int], padding: tuple[int, int, int, int]
) -> None:
    """Sizes that tiles do not divide, and padding that differs from side to side."""
    top, left, bottom, right = padding
    assume(size[0] + top + bottom >= 3 and size[1] + left + right >= 3)

    def operator(x: relax.Expr, r: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.add(op.nn.relu(op.add(op.nn.conv2d(x, w, padding=padding), b)), r)

    def reference(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(functional.conv2d(functional.pad(x, pads(padding)), w) + b) + r

    result = (batch, outer, size[0] + top + bottom - 2, size[1] + left + right - 2)
    inputs = [normal((batch, inner, *size)), normal(result, 3)]
    weights = [filters(outer, inner, 3, 3), normal((1, outer, 1, 1), 2)]
    hold(operator, reference, inputs, weights, large=True)


TAKEN = {"stride": 1, "dilation": 1, "groups": 1, "kernel": 3, "channels": 64}


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        pytest.param({}, True, marks=pytest.mark.smoke),
        ({"stride": 2}, False),
        pytest.param({"dilation": 2}, False, marks=pytest.mark.smoke),
        ({"groups": 2}, False),
        ({"kernel": 5}, False),
        ({"channels": 16}, False),
    ],
    ids=["plain", "stride", "dilation", "groups", "5x5", "few-channels"],
)
def test_which_convolutions_are_filtered(change: dict[str, int], taken: bool) -> None:
    stride, dilation, groups, kernel, channels = (TAKEN | change).values()
    inputs, weights = [normal((1, channels, 9, 35))], [filters(40, channels // groups, kernel, kernel)]

    def operator(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.nn.conv2d(x, w, (stride, stride), (1,) * 4, (dilation, dilation), groups)

    hold(operator, lambda x, w: functional.conv2d(x, w, None, stride, 1, dilation, groups), inputs, weights)
    assert ("winograd" in functions_of(lowered(operator, inputs, weights))) == taken


def test_filters_that_are_computed_are_not_transformed() -> None:
    inputs = [normal((1, 40, 9, 11)), filters(40, 40, 3, 3)]
    hold(lambda x, w: op.nn.conv2d(x, w), functional.conv2d, inputs)
    assert "winograd" not in functions_of(lowered(lambda x, w: op.nn.conv2d(x, w), inputs))


# --- minimal filtering: images that are upsampled ---


def upsampled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.conv2d(functional.interpolate(x, scale_factor=2, mode="nearest"), weight, padding=1)


@few
@given(
    **MANY_CHANNELS,
    size=st.tuples(st.integers(1, 12), st.integers(1, 40)),
)
def test_any_upsampled_image(batch: int, inner: int, outer: int, size: tuple[int, int]) -> None:
    """With a bias and a residual, as where levels of the image are added."""

    def operator(x: relax.Expr, r: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.add(op.nn.relu(op.add(of_upsampled(AROUND.conv2d)(x, w), b)), r)

    inputs = [normal((batch, inner, *size)), normal((batch, outer, 2 * size[0], 2 * size[1]), 3)]
    weights = [filters(outer, inner, 3, 3), normal((1, outer, 1, 1), 2)]
    hold(operator, lambda x, r, w, b: torch.relu(upsampled(x, w) + b) + r, inputs, weights, large=True)


def test_an_upsampled_image_of_the_pixel_decoder() -> None:
    hold(of_upsampled(AROUND.conv2d), upsampled, [normal((1, 256, 5, 144))], [filters(256, 256, 3, 3)], large=True)


@pytest.mark.parametrize(("below", "right"), [(0, 0), (0, 2), (2, 3)])
def test_an_upsampled_image_with_other_padding_below_and_to_the_right(below: int, right: int) -> None:
    hold(
        of_upsampled(lambda x, w: op.nn.conv2d(x, w, padding=(1, 1, below, right))),
        lambda x, w: functional.conv2d(
            functional.pad(functional.interpolate(x, scale_factor=2, mode="nearest"), pads((1, 1, below, right))), w
        ),
        [normal((2, 32, 5, 13))],
        [filters(40, 32, 3, 3)],
        large=True,
    )


def resized(x: relax.Expr, method: str = "nearest_neighbor") -> relax.Expr:
    size = [2 * int(extent) for extent in list(x.ty.shape)[2:]]
    return op.image.resize2d(
        x, size, method=method, coordinate_transformation_mode="asymmetric", rounding_method="floor"
    )


@pytest.mark.parametrize(
    ("enlarged", "padding", "channels", "taken"),
    [
        (lambda x: op.repeat(op.repeat(x, 2, 3), 2, 2), 1, 40, True),
        (resized, 1, 40, True),
        (lambda x: resized(x, "linear"), 1, 40, False),
        (lambda x: op.repeat(op.repeat(x, 3, 2), 2, 3), 1, 40, False),
        (lambda x: op.repeat(x, 2, 2), 1, 40, False),
        (lambda x: op.repeat(op.repeat(op.repeat(x, 2, 2), 2, 2), 2, 3), 1, 40, False),
        (lambda x: op.repeat(op.repeat(x, 2, 2), 2, 3), 0, 40, False),
        (lambda x: op.repeat(op.repeat(x, 2, 2), 2, 3), 1, 16, False),
    ],
    ids=["axes-swapped", "resized", "linear", "three-times", "one-axis", "twice", "padding", "few-channels"],
)
def test_which_images_are_read_before_they_are_upsampled(
    enlarged: Callable[[relax.Expr], relax.Expr], padding: int, channels: int, taken: bool
) -> None:
    def operator(x: relax.Expr, w: relax.Expr) -> relax.Expr:
        return op.nn.conv2d(enlarged(x), w, padding=(padding,) * 4)

    names = functions_of(lowered(operator, [normal((1, channels, 9, 35))], [filters(40, channels, 3, 3)]))
    assert ("winograd_upsampled" in names) == taken
    assert not taken or names == ["pack", "winograd_upsampled"]


def test_differences_beyond_fp32_do_no_harm() -> None:
    """Neighbours of opposite signs: their difference overflows, and no output does."""
    x = np.full((1, 32, 6, 8), 2e38, np.float32)
    x[..., ::2] *= -1
    hold(of_upsampled(AROUND.conv2d), upsampled, [x], [np.full((32, 32, 3, 3), 1 / 512, np.float32)])


# --- minimal filtering: what is not finite, and accuracy ---


@pytest.mark.parametrize(
    ("operator", "reference", "size", "places", "reached"),
    [
        (
            lambda x, w: op.nn.relu(AROUND.conv2d(x, w)),
            lambda x, w: torch.relu(functional.conv2d(x, w, padding=1)),
            (12, 37),
            ((0, 3, 0, 0), (0, 7, 5, 17), (1, 0, 11, 36), (1, 39, 6, 20)),
            (slice(4, 7), slice(16, 19), slice(8, None)),
        ),
        (
            of_upsampled(AROUND.conv2d),
            upsampled,
            (8, 23),
            ((0, 3, 0, 0), (0, 7, 4, 11), (1, 0, 7, 22), (1, 39, 4, 15)),
            (slice(7, 11), slice(21, 25), slice(11, None)),
        ),
    ],
    ids=["image", "upsampled image"],
)
def test_what_is_not_finite_reaches_as_far_as_the_filter(
    operator: Callable[..., relax.Expr],
    reference: Callable[..., torch.Tensor],
    size: tuple[int, int],
    places: tuple[tuple[int, ...], ...],
    reached: tuple[slice, slice, slice],
) -> None:
    """Patches overlap: without care one NaN would spoil every output of the tiles that read it."""
    x, w = normal((2, 40, *size)), filters(33, 40, 3, 3)
    w[4, 1, 2, 2], w[9] = 0.0, np.abs(w[9])
    call, (lines, columns, below) = call_of(machine_of(lowered(operator, [x], [w])), [w]), reached
    for value in (np.nan, np.inf, -np.inf):
        for place in places:
            x[place] = value
        actual = hold_result(call(x), reference, [x, w])
        assert not np.isfinite(actual[0, :, lines, columns]).all() and np.isfinite(actual[0, :, below]).all()


def test_sums_beyond_fp32_only_on_the_way_are_right() -> None:
    """Transformed patches overflow before the result does."""
    hold(
        lambda x, w: op.nn.conv2d(x, w, padding=(1, 1, 1, 1)),
        lambda x, w: functional.conv2d(x, w, padding=1),
        [np.full((1, 32, 6, 8), 2e38, np.float32)],
        [np.full((32, 32, 3, 3), 1 / 512, np.float32)],
    )


@pytest.mark.parametrize("stride", [1, 2], ids=["filtered", "directly"])
def test_long_sums_are_as_accurate_as_pytorch(stride: int) -> None:
    """256 channels × 3 × 3 terms, all positive, as after a ReLU."""
    hold(
        lambda x, w: op.nn.conv2d(x, w, (stride, stride), (1,) * 4),
        lambda x, w: functional.conv2d(x, w, None, stride, 1),
        [np.abs(normal((1, 256, 24, 24)))],
        [filters(64, 256, 3, 3)],
        large=True,
    )

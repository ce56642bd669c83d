"""Products with pixels that are a 1×1 convolution: the rows are projected, where that is less work and is not seen."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import ir, relax

from conformance.support.examples import examples
from conformance.support.operators import compiled, error_ratio, module_of, normal
from conformance.support.place import cpu_target
from harness.compiler.schedules.common.origins import bindings_of, callee
from harness.compiler.schedules.cpu.pipeline import to_loops

op = relax.op
Operator = Callable[..., relax.Expr]
SIDE = 12


def emit(value: relax.Expr) -> relax.Expr:
    return relax.BlockBuilder.current().emit(value)


def masks(moves: bool = True, biased: bool = True, **convolution: int) -> Operator:
    """Multiplies rows by projected pixels, between moves as the einsum of the segmentation head makes them."""

    def operator(rows: relax.Expr, image: relax.Expr, weight: relax.Expr, *bias: relax.Expr) -> relax.Expr:
        pixels = emit(op.nn.conv2d(image, weight, **convolution))
        channels = int(weight.ty.shape[0])
        if biased:
            pixels = emit(op.add(pixels, emit(op.reshape(bias[0], (1, channels, 1, 1)))))
        if moves:
            moved = emit(op.permute_dims(emit(op.expand_dims(pixels, -1)), [0, 4, 2, 3, 1]))
            pixels = emit(op.permute_dims(moved, [4, 0, 2, 3, 1]))
        return op.matmul(rows, emit(op.reshape(pixels, (1, channels, -1))))

    return operator


def shapes(rows: int, channels: int, narrow: int, taps: int = 1) -> list[tuple[int, ...]]:
    return [(1, rows, channels), (1, narrow, SIDE, SIDE), (channels, narrow, taps, taps), (channels,)]


def convolves(operator: Operator, extents: list[tuple[int, ...]]) -> bool:
    main = to_loops(module_of(operator, extents), cpu_target())["main"]
    calls = [binding.value for binding in bindings_of(main) if isinstance(binding.value, ir.Call)]
    return any("conv2d" in callee(call) for call in calls)


@examples(12, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), st.booleans(), st.booleans())
def test_masks_are_as_accurate_as_before(rows: int, channels: int, narrow: int, moves: bool, biased: bool) -> None:
    extents = shapes(rows, channels, narrow)
    left, image, weight, bias = (normal(shape, seed) for seed, shape in enumerate(extents))

    def expected(dtype: type) -> np.ndarray:
        a, p, w, b = (array.astype(dtype) for array in (left, image, weight, bias))
        pixels = w[:, :, 0, 0] @ p.reshape(narrow, -1)
        return a @ (pixels + b[:, None] if biased else pixels)

    actual = compiled(masks(moves, biased), extents)(left, image, weight, bias)
    assert error_ratio(actual, expected(np.float32), expected(np.float64)) <= 1.5


def test_few_rows_are_projected_instead_of_all_pixels() -> None:
    assert not convolves(masks(), shapes(20, 64, 64))
    assert not convolves(masks(moves=False, biased=False), shapes(20, 64, 64))


def returned(rows: relax.Expr, image: relax.Expr, weight: relax.Expr, bias: relax.Expr) -> relax.Expr:
    pixels = emit(op.nn.conv2d(image, weight))
    flat = emit(op.reshape(pixels, (1, 64, SIDE * SIDE)))
    return op.concat([emit(op.matmul(rows, flat)), flat], 1)


def squared(rows: relax.Expr, image: relax.Expr, weight: relax.Expr, bias: relax.Expr) -> relax.Expr:
    flat = emit(op.reshape(emit(op.nn.conv2d(image, weight)), (1, SIDE * SIDE, SIDE * SIDE)))
    return op.matmul(flat, flat)


@pytest.mark.parametrize(
    ("operator", "extents"),
    {
        "many rows": (masks(), shapes(80, 64, 64)),
        "of three by three pixels": (masks(padding=1), shapes(20, 64, 64, 3)),
        "of padded pixels": (masks(moves=False, padding=1), shapes(20, 64, 64)),
        "in groups": (masks(groups=2), [(1, 20, 64), (1, 64, SIDE, SIDE), (64, 32, 1, 1), (64,)]),
        "read twice": (returned, shapes(20, 64, 64)),
        "times itself": (squared, shapes(1, SIDE * SIDE, 512)),
    }.values(),
)
def test_all_other_convolutions_stay(operator: Operator, extents: list[tuple[int, ...]]) -> None:
    assert convolves(operator, extents)

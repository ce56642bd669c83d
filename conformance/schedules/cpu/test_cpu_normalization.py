"""Normalizations, reductions, softmax on the CPU: as accurate as PyTorch, for any shape, axis and offset."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from tvm import relax, tirx

from conformance.support.examples import examples
from conformance.support.kernels import functions_of, hold, lowered
from conformance.support.operators import compiled, error_ratio, normal

op = relax.op
RATIO = 1.5
"""How much larger than PyTorch's the rms error against float64 may be."""
OFFSETS = st.sampled_from([0.0, 1.0, -1000.0])
few = examples(8)


def check(run: Callable[..., np.ndarray], torch_function: Callable[..., torch.Tensor], *arrays: np.ndarray) -> None:
    """Holds a compiled operator to PyTorch in fp32 and fp64."""
    tensors = [torch.from_numpy(a) for a in arrays]
    reference = torch_function(*tensors).numpy()
    oracle = torch_function(*[t.double() for t in tensors]).numpy()
    actual = run(*arrays)
    assert actual.shape == reference.shape and actual.dtype == reference.dtype
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(reference))
    assert error_ratio(actual, reference, oracle) <= RATIO


@pytest.mark.smoke
@few
@given(
    rows=st.lists(st.integers(1, 9), min_size=0, max_size=3),
    width=st.sampled_from([1, 2, 31, 32, 33, 100, 256, 1024, 1025]),
    offset=OFFSETS,
)
def test_layer_norm(rows: list[int], width: int, offset: float) -> None:
    shape = (*rows, width)
    run = compiled(lambda x, w, b: relax.op.nn.layer_norm(x, w, b, [-1], 1e-6), [shape, (width,), (width,)])
    x, w, b = normal(shape, 0, offset=offset), normal((width,), 1), normal((width,), 2)
    check(run, lambda x, w, b: functional.layer_norm(x, (width,), w, b, 1e-6), x, w, b)


@few
@given(
    batch=st.integers(1, 3),
    groups=st.sampled_from([1, 2, 8]),
    channels=st.integers(1, 5),
    space=st.lists(st.sampled_from([1, 3, 8, 17, 40]), min_size=1, max_size=2),
    offset=OFFSETS,
    affine=st.booleans(),
)
def test_group_norm(batch: int, groups: int, channels: int, space: list[int], offset: float, affine: bool) -> None:
    width = groups * channels
    shape = (batch, width, *space)

    def operator(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        axes = list(range(2, len(shape)))
        return relax.op.nn.group_norm(x, w, b, groups, 1, axes, 1e-5, center=affine, scale=affine)

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.group_norm(x, groups, w if affine else None, b if affine else None, 1e-5)

    x, w, b = normal(shape, 0, offset=offset), normal((width,), 1), normal((width,), 2)
    check(compiled(operator, [shape, (width,), (width,)]), reference, x, w, b)


def layer_norm_2d(x: relax.Expr, square: Callable[[relax.Expr], relax.Expr], axis: int = 1) -> relax.Expr:
    """SAM 3's `LayerNorm2d` without its weights, as an importer writes it."""
    mean = op.mean(x, [axis], keepdims=True)
    variance = op.mean(square(op.subtract(x, mean)), [axis], keepdims=True)
    return op.divide(op.subtract(x, mean), op.sqrt(op.add(variance, relax.const(1e-6, "float32"))))


def torch_layer_norm_2d(x: torch.Tensor, axis: int = 1) -> torch.Tensor:
    mean = x.mean(axis, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(axis, keepdim=True) + 1e-6)


SQUARES: dict[str, Callable[[relax.Expr], relax.Expr]] = {
    "power": lambda x: op.power(x, relax.const(2.0, "float32")),
    "product": lambda x: op.multiply(x, x),
}


@few
@given(
    batch=st.integers(1, 3),
    channels=st.sampled_from([1, 2, 4, 16, 33, 256]),
    height=st.integers(1, 9),
    width=st.sampled_from([1, 3, 8, 32, 37, 72]),
    square=st.sampled_from(list(SQUARES)),
    offset=OFFSETS,
)
def test_layer_norm_over_the_channels_of_images(
    batch: int, channels: int, height: int, width: int, square: str, offset: float
) -> None:
    shape = (batch, channels, height, width)
    run = compiled(lambda x: layer_norm_2d(x, SQUARES[square]), [shape])
    check(run, torch_layer_norm_2d, normal(shape, 0, offset=offset))


@pytest.mark.parametrize("square", SQUARES)
def test_layer_norm_over_channels_is_one_kernel_with_what_follows_it(square: str) -> None:
    def operator(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        return op.nn.gelu(op.add(op.multiply(w, layer_norm_2d(x, SQUARES[square])), b))

    x, w, b = normal((2, 64, 12, 20), 0, offset=3.0), normal((64, 1, 1), 1), normal((64, 1, 1), 2)
    hold(operator, lambda x, w, b: functional.gelu(w * torch_layer_norm_2d(x) + b), [x], [w, b])
    assert functions_of(lowered(operator, [x], [w, b])) == ["layer_norm_2d_multiply_add_gelu"]


def test_layer_norm_over_channels_is_stored_as_linear_layers_read_it() -> None:
    def operator(x: relax.Expr, w: relax.Expr, b: relax.Expr) -> relax.Expr:
        y = op.permute_dims(op.add(op.multiply(w, layer_norm_2d(x, SQUARES["power"])), b), [0, 2, 3, 1])
        return op.multiply(y, op.reshape(b, [64]))

    def reference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (w * torch_layer_norm_2d(x) + b).permute(0, 2, 3, 1) * b.reshape(64)

    x, w, b = normal((2, 64, 7, 20), 0, offset=3.0), normal((64, 1, 1), 1), normal((64, 1, 1), 2)
    hold(operator, reference, [x], [w, b])
    assert "layer_norm_2d_multiply_add_multiply" in functions_of(lowered(operator, [x], [w, b]))


def another_epsilon(x: relax.Expr) -> relax.Expr:
    """One that depends on the pixel."""
    mean = op.mean(x, [1], keepdims=True)
    variance = op.mean(op.power(op.subtract(x, mean), relax.const(2.0, "float32")), [1], keepdims=True)
    return op.divide(op.subtract(x, mean), op.sqrt(op.add(variance, op.abs(mean))))


def another_deviation(x: relax.Expr) -> relax.Expr:
    """Squares of what is no deviation from the mean."""
    mean = op.mean(x, [1], keepdims=True)
    square = op.mean(op.power(op.subtract(x, op.nn.relu(mean)), relax.const(2.0, "float32")), [1], keepdims=True)
    return op.divide(op.subtract(x, mean), op.sqrt(op.add(square, relax.const(1e-6, "float32"))))


def torch_another_epsilon(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean).pow(2).mean(1, keepdim=True) + mean.abs())


def torch_another_deviation(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(1, keepdim=True)
    return (x - mean) / torch.sqrt((x - mean.relu()).pow(2).mean(1, keepdim=True) + 1e-6)


@pytest.mark.parametrize(
    ("operator", "reference"),
    [
        (lambda x: layer_norm_2d(x, SQUARES["power"], 2), lambda x: torch_layer_norm_2d(x, 2)),
        (lambda x: layer_norm_2d(x, lambda y: op.power(y, relax.const(4.0, "float32"))), None),
        (another_epsilon, torch_another_epsilon),
        (another_deviation, torch_another_deviation),
    ],
    ids=["another axis", "another power", "another epsilon", "another deviation"],
)
def test_what_looks_like_layer_norm_over_channels_is_computed_as_it_is_written(
    operator: Callable[..., relax.Expr], reference: Callable[[torch.Tensor], torch.Tensor] | None
) -> None:
    def fourth_power(x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        return (x - mean) / torch.sqrt((x - mean).pow(4).mean(1, keepdim=True) + 1e-6)

    x = normal((2, 16, 5, 7))
    hold(operator, reference or fourth_power, [x])
    assert not any("layer_norm" in name for name in functions_of(lowered(operator, [x])))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_group_norm_of_a_million_elements_per_group(offset: float) -> None:
    """The size at which sums of single fp32 terms leave the strict gate by a factor of hundreds."""
    shape = (1, 16, 288, 288)
    x, w, b = normal(shape, 0, offset=offset), normal((16,), 1), normal((16,), 2)
    run = compiled(lambda x, w, b: relax.op.nn.group_norm(x, w, b, 2, 1, [2, 3], 1e-5), [shape, (16,), (16,)])
    check(run, lambda x, w, b: functional.group_norm(x, 2, w, b, 1e-5), x, w, b)
    wide = [torch.from_numpy(a).double() for a in (x, w, b)]
    oracle = functional.group_norm(wide[0], 2, wide[1], wide[2], 1e-5).numpy()
    assert np.max(np.abs(run(x, w, b) - oracle) - 1e-5 * np.abs(oracle)) <= 1e-5


REDUCTIONS: dict[str, tuple[Any, Callable[[torch.Tensor, list[int], bool], torch.Tensor]]] = {
    "sum": (relax.op.sum, lambda x, axes, keep: torch.sum(x, axes, keep)),
    "mean": (relax.op.mean, lambda x, axes, keep: torch.mean(x, axes, keep)),
    "max": (relax.op.max, lambda x, axes, keep: torch.amax(x, axes, keep)),
    "min": (relax.op.min, lambda x, axes, keep: torch.amin(x, axes, keep)),
    "variance": (relax.op.variance, lambda x, axes, keep: torch.var(x, axes, correction=0, keepdim=keep)),
    "std": (relax.op.std, lambda x, axes, keep: torch.std(x, axes, correction=0, keepdim=keep)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
@examples(6)
@given(data=st.data(), offset=OFFSETS, keep=st.booleans())
def test_reduction_over_any_axes(name: str, data: st.DataObject, offset: float, keep: bool) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 5, 33, 70]), min_size=1, max_size=4)))
    axes = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    ours, theirs = REDUCTIONS[name]
    run = compiled(lambda x: ours(x, axes, keep), [shape])
    check(run, lambda x: theirs(x, axes, keep), normal(shape, 0, offset=offset))


@pytest.mark.smoke
@pytest.mark.parametrize(("axes", "apart"), [([0], False), ([1, 3], False), ([3, 4], False), ([0, 3], True)], ids=str)
def test_neighbouring_axes_are_reduced_where_they_lie(axes: list[int], apart: bool) -> None:
    """Axes of one element are no obstacle."""
    names = functions_of(lowered(lambda x: relax.op.sum(x, axes), [normal((4, 5, 1, 6, 7))]))
    assert any("transpose" in name for name in names) == apart


@pytest.mark.parametrize("shape", [(1, 300_000), (3, 131_072), (200_003,)], ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_long_reduction(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = REDUCTIONS[name]
    axes = [len(shape) - 1]
    check(compiled(lambda x: ours(x, axes), [shape]), lambda x: theirs(x, axes, False), normal(shape, 0, offset=10.0))


@pytest.mark.parametrize("axes", [[1], [0], [0, 1]], ids=str)
@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_pass_nan_of_both_signs_on(name: str, axes: list[int]) -> None:
    ours, theirs = REDUCTIONS[name]
    run = compiled(lambda x: ours(x, axes), [(3, 100)])
    for position, payload in itertools.product([0, 40, 99], [0x7FC00000, 0xFFC00000]):
        x = normal((3, 100))
        x[1, position] = np.array([payload], np.uint32).view(np.float32)[0]
        x[0, 5], x[2, 7] = np.inf, -np.inf
        np.testing.assert_array_equal(run(x), theirs(torch.from_numpy(x), axes, False).numpy())


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_product(axis: int) -> None:
    x = normal((7, 33, 20), 4)
    run = compiled(lambda x: relax.op.prod(x, [axis]), [x.shape])
    check(run, lambda x: torch.prod(x, axis), x)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_cumulative_sum(axis: int, exclusive: bool) -> None:
    x = normal((5, 700, 3), 5, offset=1.0)
    exact = np.cumsum(x.astype(np.float64), axis)
    want = (exact - x if exclusive else exact).astype(np.float32)
    got = compiled(lambda x: relax.op.cumsum(x, axis, exclusive=exclusive), [x.shape])(x)
    np.testing.assert_array_max_ulp(got, want, 1)


@pytest.mark.smoke
def test_cumulative_sum_of_any_number_of_lines() -> None:
    x = normal((5, 7), 5)
    run = compiled(lambda x: relax.op.cumsum(x, 1), [(tirx.Var("n", "int64"), 7)])
    check(run, lambda x: torch.cumsum(x, 1), x)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_cumulative_sum_of_integers(dtype: str) -> None:
    x = np.arange(60, dtype=dtype).reshape(4, 15)
    run = compiled(lambda x: relax.op.cumsum(x, 1), [x.shape], dtype)
    np.testing.assert_array_equal(run(x), np.cumsum(x, 1))


@pytest.mark.parametrize(
    "log", [pytest.param(False, id="softmax", marks=pytest.mark.smoke), pytest.param(True, id="log_softmax")]
)
@few
@given(data=st.data(), scale=st.sampled_from([0.1, 4.0, 60.0]), masked=st.booleans())
def test_softmax(log: bool, data: st.DataObject, scale: float, masked: bool) -> None:
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 7, 32, 50, 577]), min_size=1, max_size=3)))
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    if math.prod(shape) > 400_000:
        shape = shape[:2]
        axis = 0
    x = normal(shape, 6, scale=scale)
    if masked:
        x[np.random.default_rng(7).random(shape) < 0.3] = -np.inf
    ours = relax.op.nn.log_softmax if log else relax.op.nn.softmax
    theirs = functional.log_softmax if log else functional.softmax
    check(compiled(lambda x: ours(x, axis), [shape]), lambda x: theirs(x, axis), x)


def test_softmax_of_a_row_without_any_finite_value_is_nan() -> None:
    x = np.full((2, 40), -np.inf, np.float32)
    x[1, 3] = 2.0
    got = compiled(lambda x: relax.op.nn.softmax(x, -1), [x.shape])(x)
    assert np.isnan(got[0]).all()
    np.testing.assert_array_equal(got[1], np.eye(40, dtype=np.float32)[3])

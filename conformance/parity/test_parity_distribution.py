"""How errors are distributed: every element is counted once, and what is drawn is what the arrays hold."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from PIL import Image

from conformance.support.examples import examples
from harness.core.outcome import BINS, CELLS, EDGES, MASKS, PIXELS, WITHIN, Distribution, MaskPicture
from harness.parity import metrics
from harness.parity.distribution import add_distributions, distribution, histogram
from harness.parity.references import Reference
from harness.parity.verdict import judge

Array = npt.NDArray[Any]
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def drawn(picture: bytes | None) -> Array:
    assert picture is not None
    with Image.open(io.BytesIO(picture)) as image:
        return np.asarray(image.convert("RGBA"))


def noise(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def found_in(name: str, actual: Array, reference: Array) -> Distribution:
    found = distribution(name, actual, reference)
    assert found is not None
    return found


# --- the histogram ---


@given(st.data())
def test_every_element_is_counted_and_those_outside_are_those_of_the_gate(data: st.DataObject) -> None:
    shape = data.draw(array_shapes(max_dims=3, max_side=6))
    a, r = (data.draw(arrays(np.float32, shape, elements=FLOATS)) for _ in range(2))
    counts = histogram(a, r)
    assert len(counts) == BINS
    assert sum(counts) == a.size
    assert sum(counts[WITHIN:]) == metrics.difference(a, r).outside


@given(st.floats(1e-7, 1e4), st.floats(-1e3, 1e3))
def test_an_error_is_counted_between_its_edges(factor: float, value: float) -> None:
    reference = np.array([value])
    actual = reference + factor * (metrics.ATOL + metrics.RTOL * abs(value))
    (place,) = np.flatnonzero(histogram(actual, reference))
    error = abs(float(actual[0] - reference[0])) / (metrics.ATOL + metrics.RTOL * abs(value))
    slack = 1e-5  # of logarithms in float32
    assert place == 0 or error > EDGES[place - 1] * (1 - slack)
    assert place == BINS - 1 or error <= EDGES[place] * (1 + slack)


def test_many_chunks_are_the_whole() -> None:
    r = noise(3, 1 << 18)
    a = r + noise(3, 1 << 18, seed=1) * np.float32(1e-5)
    assert histogram(a, r) == tuple(np.sum([histogram(x, y) for x, y in zip(a, r, strict=True)], axis=0))


# --- the map ---


@given(st.integers(8, 60), st.integers(1, 3), st.data())
def test_the_map_has_the_largest_error_of_each_cell(side: int, leading: int, data: st.DataObject) -> None:
    r = noise(leading, side, side)
    a = r.copy()
    n, row, column = (data.draw(st.integers(0, extent - 1)) for extent in a.shape)
    a[n, row, column] += 3
    largest = np.array(found_in("features", a, r).largest)
    rows, columns = largest.shape
    assert rows == columns == min(side, CELLS)
    assert largest.max() == metrics.difference(a, r).max_abs
    (where,) = np.argwhere(largest)
    assert all(cell == max(k for k in range(rows) if k * side // rows <= at)
               for cell, at in zip(where, (row, column), strict=True))  # fmt: skip


def test_what_is_not_a_number_on_one_side_is_infinitely_wrong_and_on_both_right() -> None:
    r = noise(1, 8, 8)
    r[0, 0, 0], r[0, 7, 7] = np.nan, np.inf
    a = r.copy()
    a[0, 3, 4] = np.nan
    found = found_in("features", a, r)
    assert np.argwhere(found.largest).tolist() == [[3, 4]]
    assert found.largest[3][4] == math.inf
    assert (found.histogram[0], found.histogram[-1]) == (63, 1)


@pytest.mark.parametrize(
    ("name", "shape", "map_there", "masks_there"),
    [
        ("features", (1, 256, 72, 72), True, False),
        ("pred_masks", (1, 4, 40, 120), True, True),
        ("text/found/masks", (3, 30, 45), True, True),
        ("click/logits", (3, 28, 28), True, True),
        ("masks", (0, 30, 45), False, False),
        ("logits", (1, 200, 1), False, False),  # of scores
        ("hs", (6, 1, 200, 256), False, False),  # tokens × channels
        ("padding_mask", (1, 32), False, False),
        ("features", (5184, 1, 256), False, False),
    ],
)
def test_what_is_an_image_and_what_a_mask(
    name: str, shape: tuple[int, ...], map_there: bool, masks_there: bool
) -> None:
    r = noise(*shape)
    found = distribution(name, r.copy(), r) or Distribution()
    assert (bool(found.largest), bool(found.masks)) == (map_there, masks_there)


# --- pictures of masks ---


def masks_of(actual: Array, reference: Array) -> tuple[MaskPicture, ...]:
    return found_in("masks", actual, reference).masks


def test_those_masks_are_drawn_in_which_most_differs_and_then_those_that_show_something() -> None:
    r = np.full((2, 4, 20, 30), -1, np.float32)
    r[0, 3, :10] = r[1, 2, :9] = r[1, 0, :2] = 1
    a = r.copy()
    a[0, 1, 5, 5] = 1
    assert [(mask.index, mask.differing) for mask in masks_of(a, r)] == [((0, 1), 1), ((0, 3), 0), ((1, 2), 0)]


def test_a_mask_is_drawn_on_both_sides_of_zero_and_what_differs_is_marked() -> None:
    r = noise(1, 1, 40, 120) - np.float32(0.5)
    a = r.copy()
    a[0, 0, 33, 100] *= -1
    (mask,) = masks_of(a, r)
    assert (mask.size, mask.differing) == ((40, 120), 1)
    rows, columns = (
        [(k * length // n + (k + 1) * length // n) // 2 for k in range(n)] for n, length in ((32, 40), (96, 120))
    )
    grey = drawn(mask.torch)[..., 0]
    assert grey.shape == (32, 96)
    np.testing.assert_array_equal(grey > 127, (r[0, 0] > 0)[np.ix_(rows, columns)])
    assert len(np.unique(grey)) <= 16
    marked = drawn(mask.marks)[..., 3] > 0
    assert np.argwhere(marked).tolist() == [[27, 80]], "the cells that begin at row 33 and column 100"


def test_masks_of_truth_values_are_black_and_white() -> None:
    r = noise(2, 50, 60) > 0
    a = r.copy()
    a[1] = ~a[1]
    first, second = masks_of(a, r)
    assert (first.tvm, first.marks, first.differing) == (None, None, 0)
    np.testing.assert_array_equal(drawn(first.torch)[..., 0], r[0] * 255)
    np.testing.assert_array_equal(drawn(second.tvm)[..., 0], a[1] * 255)
    assert (drawn(second.marks)[..., 3] > 0).all()
    assert found_in("masks", a, r).histogram == ()


@examples(20)
@given(array_shapes(min_dims=3, max_dims=4, min_side=8, max_side=300), st.integers(0, 9))
def test_whatever_the_shape_it_is_small(shape: tuple[int, ...], seed: int) -> None:
    shape = (*(min(extent, 5) for extent in shape[:-2]), *shape[-2:])
    r = noise(*shape, seed=seed)
    found = found_in("masks", r + noise(*shape, seed=seed + 1), r)
    assert len(found.masks) == min(MASKS, math.prod(shape[:-2]))
    assert len(found.largest) <= CELLS and len(found.largest[0]) <= CELLS
    for mask in found.masks:
        height, width, _ = drawn(mask.torch).shape
        assert max(height, width) == min(max(shape[-2:]), PIXELS)
        assert drawn(mask.tvm).shape == drawn(mask.torch).shape
        assert sum(len(picture or b"") for picture in (mask.torch, mask.tvm, mask.marks)) < 3 * PIXELS**2


# --- verdicts ---


def test_a_verdict_is_the_same_with_a_distribution_and_what_cannot_be_compared_has_none() -> None:
    reference = {name: noise(2, 9, 9) for name in ("same", "shape", "missing", "dtype")}
    actual: dict[str, Array] = {"same": reference["same"] * np.float32(1.001), "shape": noise(2, 9, 8)}
    actual |= {"dtype": reference["dtype"].astype(np.float64), "extra": noise(3)}
    exact = {name: array.astype(np.float64) for name, array in reference.items()}
    verdicts = judge(actual, Reference.from_run(reference, exact))
    found = add_distributions(verdicts, actual, reference)
    assert [(each.name, each.kind, each.outside) for each in found] == [
        (each.name, each.kind, each.outside) for each in verdicts
    ]
    assert [each.name for each in found if each.distribution is not None] == ["same"]
    assert sum(found[0].distribution.histogram[WITHIN:]) == found[0].outside > 0

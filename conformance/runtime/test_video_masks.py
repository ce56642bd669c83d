"""Masks of a frame: every function gives what upstream's gives, bit by bit."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.ndimage import gaussian_filter, label

from conformance.support.examples import examples
from harness.runtime.sam3.connected_components import small_components
from harness.runtime.sam3.video.masks import areas, boxes_of_masks, mask_iou, nms, without_holes_and_sprinkles

pytestmark = pytest.mark.smoke


@cache
def upstreams() -> SimpleNamespace:
    """The functions of upstream that are compared with."""
    from harness.models.sam3.upstream import upstream

    with upstream():
        from sam3.model.sam3_tracker_utils import fill_holes_in_mask_scores
        from sam3.perflib.masks_ops import mask_iou, masks_to_boxes
        from sam3.perflib.nms import nms_masks
    return SimpleNamespace(fill=fill_holes_in_mask_scores, iou=mask_iou, boxes=masks_to_boxes, nms=nms_masks)


SIDES = st.tuples(st.integers(1, 13), st.integers(1, 13))
COUNTS = st.integers(0, 6)


@st.composite
def masks(draw: Any, count: st.SearchStrategy[int] = COUNTS, sides: st.SearchStrategy[Any] = SIDES) -> np.ndarray:
    return draw(arrays(bool, (draw(count), *draw(sides))))


@st.composite
def pairs(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    sides = draw(SIDES)
    return draw(masks(sides=st.just(sides))), draw(masks(sides=st.just(sides)))


@given(both=pairs())
@example(both=(np.zeros((2, 3, 3), bool), np.ones((1, 3, 3), bool)))
def test_mask_iou_is_upstreams(both: tuple[np.ndarray, np.ndarray]) -> None:
    first, second = both
    expected = upstreams().iou(*map(torch.from_numpy, both)).numpy()
    got = mask_iou(first, second)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(areas(first), first.sum(axis=(1, 2)))


def test_bits_are_counted_alike_without_numpys_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy 1.26, which is supported, has no `bitwise_count`."""
    some = np.random.default_rng(0).random((7, 37, 41)) > 0.4
    expected = upstreams().iou(*[torch.from_numpy(some)] * 2).numpy()
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    np.testing.assert_array_equal(mask_iou(some, some), expected)


SCORES = st.sampled_from([0.0, 0.1, 0.3, 0.5, float(np.nextafter(np.float32(0.5), np.float32(1))), 0.7, 0.9, 1.0])
THRESHOLDS = st.sampled_from([0.0, 0.1, 0.25, 0.5, 1 / 3, 1.0])


@examples(200)
@given(found=masks(st.integers(0, 24), st.tuples(st.integers(1, 4), st.integers(1, 4))), data=st.data())
def test_nms_is_upstreams(found: np.ndarray, data: Any) -> None:
    """Ties of scores and overlaps that equal the threshold among it; logits are positive inside of a mask."""
    scores = data.draw(arrays(np.float32, len(found), elements=SCORES.map(np.float32)))
    score, iou = data.draw(SCORES), data.draw(THRESHOLDS)
    logits = torch.from_numpy(np.where(found, np.float32(2), np.float32(-2)))
    expected = upstreams().nms(torch.from_numpy(scores), logits, score, iou).numpy()
    np.testing.assert_array_equal(nms(found, scores, score, iou), expected)


@pytest.mark.parametrize("seed", range(3))
def test_nms_of_many_detections_with_equal_scores(seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    found = random.random((200, 6, 6)) > 0.5
    scores = random.choice(np.linspace(0.4, 0.9, 12).astype(np.float32), 200)
    logits = torch.from_numpy(np.where(found, np.float32(2), np.float32(-2)))
    expected = upstreams().nms(torch.from_numpy(scores), logits, 0.5, 0.3).numpy()
    assert 1 < expected.sum() < 100
    np.testing.assert_array_equal(nms(found, scores, 0.5, 0.3), expected)


@given(some=masks())
def test_boxes_are_upstreams(some: np.ndarray) -> None:
    expected = upstreams().boxes(torch.from_numpy(some), list(range(len(some)))).numpy()
    got = boxes_of_masks(some)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


LOGITS = st.sampled_from([-3.0, -0.1, 0.0, 0.1, 2.0])


@examples(150)
@given(count=st.integers(1, 4), sides=SIDES, largest=st.integers(0, 20), data=st.data())
def test_holes_and_sprinkles_are_upstreams(count: int, sides: Any, largest: int, data: Any) -> None:
    logits = data.draw(arrays(np.float32, (count, *sides), elements=LOGITS.map(np.float32)))
    given_logits = logits.copy()
    expected = upstreams().fill(torch.from_numpy(logits)[:, None], largest)[:, 0].numpy()
    got = without_holes_and_sprinkles(logits, largest)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(logits, given_logits, "what was given stays")


@pytest.mark.parametrize("seed", range(3))
def test_holes_and_sprinkles_of_large_masks_are_upstreams(seed: int) -> None:
    print(f"seed {seed}")
    noise = np.random.default_rng(seed).standard_normal((2, 97, 96))  # upstream takes minutes for 288 x 288
    logits = np.stack([gaussian_filter(mask, 0.7 + 0.4 * seed) for mask in noise]).astype(np.float32)
    expected = upstreams().fill(torch.from_numpy(logits)[:, None], 16)[:, 0].numpy()
    got = without_holes_and_sprinkles(logits)
    np.testing.assert_array_equal(got, expected)
    assert (got == np.float32(0.1)).any(), "some hole is filled"
    assert (got == np.float32(-0.1)).any(), "some part is removed"


def test_nothing_to_clean() -> None:
    assert without_holes_and_sprinkles(np.zeros((0, 5, 5), np.float32)).shape == (0, 5, 5)


@examples(150)
@given(some=masks(), data=st.data())
@example(some=np.ones((2, 3, 4), bool), data=None)
def test_small_components_are_those_of_an_image_library(some: np.ndarray, data: Any) -> None:
    """Labels of SciPy, mask by mask; pixels at the end of a row and at the begin of the next one do not touch."""
    largest = (
        np.full(len(some), 12) if data is None else data.draw(arrays(np.int64, len(some), elements=st.integers(0, 30)))
    )
    expected = np.zeros_like(some)
    for mask, limit, small in zip(some, largest, expected, strict=True):
        parts, _ = label(mask, np.ones((3, 3)))
        small[:] = mask & (np.bincount(parts.ravel())[parts] <= limit)
    np.testing.assert_array_equal(small_components(some, largest), np.flatnonzero(expected))

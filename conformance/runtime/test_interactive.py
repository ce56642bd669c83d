"""Prompts for one object: what the model gets of them, which masks are given back, which holes are filled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from conformance.support.sentences import sentence
from harness.runtime import ObjectPrompt
from harness.runtime.errors import ModelError
from harness.runtime.sam3.description import Capacity
from harness.runtime.sam3.interactive import ABSENT, LARGEST_HOLE, PAD, encode_object_prompt, fill_holes, select_masks

pytestmark = pytest.mark.smoke

SIZE = (451, 300)
CAPACITY = Capacity(clicks=4)
MASK = np.zeros((288, 288), np.float32)

POINT = st.tuples(st.floats(0, SIZE[0]), st.floats(0, SIZE[1]))


def encoded(prompt: ObjectPrompt) -> tuple[np.ndarray, list[int]]:
    """Coordinates of all places, and their labels."""
    inputs = encode_object_prompt(prompt, SIZE, CAPACITY).inputs
    assert {name: array.dtype.name for name, array in inputs.items()} == {
        "coordinates": "float32",
        "labels": "int64",
        "mask": "float32",
        "has_mask": "bool",
    }
    assert inputs["coordinates"].shape == (1, CAPACITY.clicks + 3, 2)
    return inputs["coordinates"][0], inputs["labels"][0].tolist()


@given(points=st.lists(POINT, min_size=1, max_size=CAPACITY.clicks), data=st.data())
def test_points_come_in_their_order_and_upstreams_padding_point_after_them(points: Any, data: Any) -> None:
    labels = data.draw(st.lists(st.integers(0, 1), min_size=len(points), max_size=len(points)))
    coordinates, kinds = encoded(ObjectPrompt(points, labels))
    scaled = np.array(points, np.float32) / np.array(SIZE, np.float32) * np.float32(1008)
    np.testing.assert_array_equal(coordinates[: len(points)], scaled)
    assert kinds == [*labels, PAD, *[ABSENT] * (CAPACITY.clicks + 2 - len(points))]
    assert not coordinates[len(points) :].any()


@given(corner=st.tuples(st.floats(0, 400), st.floats(0, 250)), extent=st.tuples(st.floats(1, 50), st.floats(1, 50)))
def test_a_box_is_its_two_corners_before_the_points(corner: Any, extent: Any) -> None:
    box = (*corner, corner[0] + extent[0], corner[1] + extent[1])
    coordinates, kinds = encoded(ObjectPrompt([(7, 8)], [0], box))
    assert kinds == [2, 3, 0, PAD, *[ABSENT] * 3]
    corners, _ = encoded(ObjectPrompt([box[:2], box[2:]]))
    np.testing.assert_array_equal(coordinates[:2], corners[:2])


def test_a_mask_alone_has_no_points_and_no_padding_point() -> None:
    prompt = encode_object_prompt(ObjectPrompt(mask=MASK + 1), SIZE, CAPACITY)
    assert prompt.inputs["labels"][0].tolist() == [ABSENT] * 7
    assert prompt.inputs["has_mask"].tolist() == [True]
    assert (prompt.inputs["mask"] == 1).all()
    without = encode_object_prompt(ObjectPrompt([(1, 1)]), SIZE, CAPACITY).inputs
    assert without["has_mask"].tolist() == [False]
    assert not without["mask"].any()


def test_a_mask_is_taken_as_upstreams_predictor_gives_and_takes_it() -> None:
    logits = np.random.default_rng(0).standard_normal((3, 288, 288)).astype(np.float32)
    ours, theirs = (
        encode_object_prompt(ObjectPrompt(mask=mask), SIZE, CAPACITY).inputs["mask"]
        for mask in (logits[1], logits[1:2])
    )
    np.testing.assert_array_equal(theirs, ours)


def test_a_box_that_reaches_beyond_the_image_is_cut_and_told() -> None:
    prompt = encode_object_prompt(ObjectPrompt(box=(-5, 10, 460, 290)), SIZE, CAPACITY)
    inside = np.array([(0, 10), (451, 290)], np.float32) / np.array(SIZE, np.float32) * np.float32(1008)
    np.testing.assert_array_equal(prompt.inputs["coordinates"][0, :2], inside)
    assert prompt.notes == ("Box 1 reaches beyond the image of 451 x 300 pixels; the part inside counts.",)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (ObjectPrompt(), sentence("nothing-asked")),
        (ObjectPrompt([]), sentence("nothing-asked")),
        (ObjectPrompt([(1, 2)], [2]), sentence("wrong-labels", singular="point", raw="[2]")),
        (ObjectPrompt([(1, 2)], [1, 0]), sentence("number-of-labels", singular="point", labels=2, count=1)),
        (ObjectPrompt([(1, 2)] * 5), sentence("too-many", points=5, clicks=4)),
        (ObjectPrompt([(452, 2)]), sentence("outside", index=1, x=452, y=2, width=451, height=300)),
        (ObjectPrompt([(float("nan"), 2)]), sentence("not-finite", index=1, row="nan, 2")),
        (ObjectPrompt([(1, 2, 3)]), sentence("no-list", coordinates="x, y")),
        (ObjectPrompt(box=(9, 9, 5, 20)), sentence("no-area", box="9, 9, 5, 20", fault="reversed")),
        (ObjectPrompt(box=(500, 9, 600, 20)), sentence("outside", box="500, 9, 600, 20")),
        (ObjectPrompt(box=(1, 2, 3)), sentence("no-list", coordinates="x0, y0, x1, y1")),
        (
            ObjectPrompt(mask=MASK[:256, :256]),
            sentence("wrong-mask", actual="float32 [256, 256]", mask_size=288, mask_size2=288),
        ),
        (ObjectPrompt(mask=MASK.astype(np.float64)), sentence("wrong-mask", actual="float64 [288, 288]")),
        (ObjectPrompt(mask=MASK > 0), sentence("wrong-mask", actual="bool [288, 288]")),
        (ObjectPrompt(mask=np.stack([MASK] * 3)), sentence("wrong-mask", actual="float32 [3, 288, 288]")),
        (ObjectPrompt(mask=[[1.0]]), sentence("wrong-mask", actual="[[1.0]]")),
        (ObjectPrompt(mask=MASK + np.inf), sentence("not-finite")),
    ],
)
def test_what_makes_no_sense_is_one_sentence(prompt: ObjectPrompt, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        encode_object_prompt(prompt, SIZE, CAPACITY)


LOGITS = arrays(np.float32, (4, 5, 6), elements=st.sampled_from([-1.0, -0.04, 0.0, 0.04, 1.0]))
IOU = arrays(np.float32, 4, elements=st.floats(0, 1, width=32))


@given(logits=LOGITS, iou=IOU, multimask=st.booleans())
def test_the_masks_that_are_given_are_those_of_upstreams_decoder(
    logits: np.ndarray, iou: np.ndarray, multimask: bool
) -> None:
    import torch

    from harness.models.sam3.upstream import upstream

    with upstream():
        from sam3.sam.mask_decoder import MaskDecoder

        decoder = MaskDecoder(
            transformer_dim=8,
            transformer=torch.nn.Identity(),
            dynamic_multimask_via_stability=True,
        ).eval()
        masks, scores = torch.from_numpy(logits)[None], torch.from_numpy(iou)[None]
        decoder.predict_masks = lambda **_: (masks, scores, torch.zeros(1, 4, 8), torch.zeros(1, 1))
        expected, expected_iou, _, _ = decoder(*[None] * 4, multimask_output=multimask, repeat_image=False)
    got, got_iou = select_masks(logits, iou, multimask)
    np.testing.assert_array_equal(got, expected[0].numpy())
    np.testing.assert_array_equal(got_iou, expected_iou[0].numpy())


@pytest.mark.parametrize("seed", range(4))
def test_holes_are_filled_as_upstream_fills_them(seed: int) -> None:
    import torch
    from scipy.ndimage import gaussian_filter

    from harness.models.sam3.upstream import upstream

    print(f"seed {seed}")
    noise = np.random.default_rng(seed).standard_normal((2, 288, 288))
    logits = np.stack([gaussian_filter(mask, 2 + seed) for mask in noise]).astype(np.float32)
    with upstream():
        from sam3.model.utils.sam1_utils import SAM2Transforms

        transforms = SAM2Transforms(1008, 0.0, max_hole_area=float(LARGEST_HOLE))
        expected = transforms.postprocess_masks(torch.from_numpy(logits)[None], (288, 288))[0].numpy()
    filled = fill_holes(logits)
    np.testing.assert_array_equal(filled, expected)
    assert (filled != logits).any(), "some hole is small enough"
    assert (filled <= 0).any(), "and some is not"


@pytest.mark.parametrize(("area", "filled"), [(LARGEST_HOLE, True), (LARGEST_HOLE + 1, False)])
def test_the_largest_hole_that_is_filled(area: int, filled: bool) -> None:
    mask = np.ones((1, 288, 288), np.float32)
    hole = np.zeros((17, 17), bool)
    hole.reshape(-1)[:area] = True
    mask[0, 100:117, 100:117][hole] = -1
    assert (fill_holes(mask) > 0).all() == filled

"""Prompts: what reaches the model is what upstream would give it; what makes no sense is one sentence."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.examples import examples
from conformance.support.sentences import sentence
from harness.models.sam3.upstream import import_sam3
from harness.models.sam3.vocabulary import installed_tokenizer
from harness.runtime.errors import ModelError
from harness.runtime.sam3.description import Capacity
from harness.runtime.sam3.prompts import EncodedPrompt, Prompt, check_prompt, clip_boxes, encode_prompt

pytestmark = pytest.mark.law

SIZE = (640, 480)
CAPACITY = Capacity(points=4, boxes=5)


def encode(size: tuple[int, int] = SIZE, capacity: Capacity = CAPACITY, **asked: Any) -> EncodedPrompt:
    return encode_prompt(Prompt(**asked), size, capacity, installed_tokenizer())


def ids(text: str) -> np.ndarray:
    return installed_tokenizer().tokenize([text]).ids


def test_shapes_dtypes_and_padding() -> None:
    encoded = encode(text="cat", boxes=[(64, 48, 320, 240)], box_labels=[False], points=[(320, 120), (0, 480)])
    np.testing.assert_array_equal(encoded.tokens, ids("cat"))
    shapes = {name: (array.dtype.name, array.shape) for name, array in encoded.geometry.items()}
    assert shapes == {
        "points": ("float32", (4, 1, 2)),
        "points_mask": ("bool", (1, 4)),
        "point_labels": ("int64", (4, 1)),
        "boxes": ("float32", (5, 1, 4)),
        "boxes_mask": ("bool", (1, 5)),
        "box_labels": ("int64", (5, 1)),
    }
    assert encoded.geometry["points"][:, 0].tolist() == [[0.5, 0.25], [0, 1], [0, 0], [0, 0]]
    assert encoded.geometry["points_mask"].tolist() == [[False, False, True, True]]
    assert encoded.geometry["point_labels"][:, 0].tolist() == [1, 1, 0, 0]
    np.testing.assert_array_equal(encoded.geometry["boxes"][0, 0], np.float32([0.3, 0.3, 0.4, 0.4]))
    assert not encoded.geometry["boxes"][1:].any()
    assert encoded.geometry["boxes_mask"].tolist() == [[False, True, True, True, True]]
    assert not encoded.geometry["box_labels"].any()
    assert encoded.notes == ()


def test_without_a_text_upstream_asks_for_visual() -> None:
    np.testing.assert_array_equal(encode(points=[(1, 1)]).tokens, ids("visual"))
    np.testing.assert_array_equal(encode(boxes=[(1, 1, 9, 9)]).tokens, ids("visual"))


def test_a_text_alone_has_no_geometry() -> None:
    geometry = encode(text="a cat").geometry
    assert geometry["points_mask"].all()
    assert geometry["boxes_mask"].all()


BOX = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)).filter(
    lambda corners: abs(corners[0] - corners[2]) > 1e-3 and abs(corners[1] - corners[3]) > 1e-3
)


@examples(100)
@given(
    corners=st.lists(BOX, max_size=5),
    points=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4),
    size=st.tuples(st.integers(1, 9000), st.integers(1, 9000)),
    data=st.data(),
)
def test_geometry_is_what_upstreams_prompt_holds(corners: Any, points: Any, size: Any, data: Any) -> None:
    """Appended one by one to upstream's `Prompt`, from boxes that its own functions convert and normalize."""
    import_sam3()
    from sam3.model.box_ops import box_xyxy_to_cxcywh
    from sam3.model.geometry_encoders import Prompt as UpstreamPrompt

    scale = np.array([*size, *size])
    boxes = [np.array([min(x0, x1), min(y0, y1), max(x0, x1), max(y0, y1)]) * scale for x0, y0, x1, y1 in corners]
    labels = data.draw(st.lists(st.booleans(), min_size=len(boxes), max_size=len(boxes)))
    point_labels = data.draw(st.lists(st.booleans(), min_size=len(points), max_size=len(points)))
    upstream = UpstreamPrompt(
        box_embeddings=torch.zeros(0, 1, 4),
        box_mask=torch.zeros(1, 0, dtype=torch.bool),
        point_embeddings=torch.zeros(0, 1, 2),
        point_mask=torch.zeros(1, 0, dtype=torch.bool),
    )
    for box, label in zip(boxes, labels, strict=True):
        normalized = (box_xyxy_to_cxcywh(torch.from_numpy(box)) / torch.tensor(scale)).float()
        upstream.append_boxes(normalized.view(1, 1, 4), torch.tensor([[label]]))
    for point, label in zip(points, point_labels, strict=True):
        upstream.append_points(torch.tensor(point, dtype=torch.float32).view(1, 1, 2), torch.tensor([[label]]))

    pixels = [np.array(point) * size for point in points]
    ours = encode(size, text="x", boxes=boxes, box_labels=labels, points=pixels, point_labels=point_labels).geometry
    for kind, name, count in (("box", "boxes", len(boxes)), ("point", "points", len(points))):
        theirs = getattr(upstream, f"{kind}_embeddings").numpy()
        np.testing.assert_allclose(ours[name][:count], theirs, rtol=0, atol=1e-7)
        np.testing.assert_array_equal(ours[f"{kind}_labels"][:count], getattr(upstream, f"{kind}_labels").numpy())
        np.testing.assert_array_equal(ours[f"{name}_mask"][:, :count], getattr(upstream, f"{kind}_mask").numpy())
        assert ours[f"{name}_mask"][:, count:].all()


@pytest.mark.parametrize(
    "boxes",
    [
        np.array([[1, 2, 30, 40]], np.int32),
        np.array([[1, 2, 30, 40]], np.float32),
        [[1, 2, 30, 40]],
        [(1, 2.0, 30, 40)],
    ],
)
def test_boxes_come_as_any_sequence(boxes: Any) -> None:
    expected = encode(boxes=[(1, 2, 30, 40)]).geometry["boxes"]
    np.testing.assert_array_equal(encode(boxes=boxes).geometry["boxes"], expected)


@pytest.mark.parametrize("labels", [[True, False], [1, 0], np.array([True, False]), np.array([1.0, 0.0]), (True, 0)])
def test_labels_come_as_any_sequence(labels: Any) -> None:
    encoded = encode(points=[(1, 1), (2, 2)], point_labels=labels)
    assert encoded.geometry["point_labels"][:, 0].tolist() == [1, 0, 0, 0]


def test_empty_arrays_are_no_boxes_and_points() -> None:
    encoded = encode(text="cat", boxes=np.zeros((0, 4)), box_labels=np.zeros(0), points=[], point_labels=[])
    assert encoded.geometry["boxes_mask"].all()
    assert encoded.geometry["points_mask"].all()


@pytest.mark.parametrize(
    ("box", "inside"),
    [
        ((-10, -20, 32, 48), (0, 0, 32, 48)),
        ((600, 400, 700, 500), (600, 400, 640, 480)),
        ((-math.inf, 0, 10, 10), None),
        ((-1e30, -1e30, 1e30, 1e30), (0, 0, 640, 480)),
    ],
)
def test_a_box_that_reaches_beyond_the_image_is_cut_off_and_it_says_so(box: Any, inside: Any) -> None:
    if inside is None:
        with pytest.raises(ModelError, match=sentence("not-finite")):
            encode(boxes=[box])
        return
    encoded = encode(boxes=[(1, 1, 2, 2), box])
    assert encoded.notes == ("Box 2 reaches beyond the image of 640 x 480 pixels; the part inside counts.",)
    np.testing.assert_array_equal(encoded.geometry["boxes"][1], encode(boxes=[inside]).geometry["boxes"][0])


def test_a_box_in_parts_of_the_image_is_noted() -> None:
    boxes, notes = clip_boxes(np.array([[0.2, 0.3, 0.6, 0.8], [0, 0, 1, 1]]), (640, 480))
    assert boxes[0].tolist() == [0.2, 0.3, 0.6, 0.8]
    assert notes == (
        "Box 1 (0.2, 0.3, 0.6, 0.8) is less than a pixel; coordinates are pixels of the image of 640 x 480, "
        "and not parts of 1.",
    )


def test_a_box_of_the_whole_image_is_not_cut() -> None:
    encoded = encode(boxes=[(0, 0, 640, 480)])
    assert encoded.notes == ()
    assert encoded.geometry["boxes"][0, 0].tolist() == [0.5, 0.5, 1, 1]


BAD = {
    "nothing": ({}, sentence("nothing-asked")),
    "nothing but lists": ({"boxes": [], "points": []}, sentence("nothing-asked")),
    "empty text": ({"text": ""}, sentence("empty-text")),
    "blank text": ({"text": " \t\n\u00a0"}, sentence("empty-text")),
    "empty text with a box": ({"text": "", "boxes": [(1, 1, 2, 2)]}, sentence("empty-text")),
    "text that is none": ({"text": b"cat"}, sentence("not-a-text")),
    "reversed x": (
        {"boxes": [(1, 1, 2, 2), (30, 1, 20, 2)]},
        sentence("no-area", index=2, box="30, 1, 20, 2", fault="reversed"),
    ),
    "reversed y": ({"boxes": [(1, 5, 2, 2)]}, sentence("no-area", index=1, fault="reversed")),
    "empty box": ({"boxes": [(5, 5, 5, 9)]}, sentence("no-area", index=1, fault="empty")),
    "box right of it": (
        {"boxes": [(640, 5, 700, 9)]},
        sentence("outside", box="640, 5, 700, 9", width=640, height=480),
    ),
    "box above it": ({"boxes": [(5, -9, 7, 0)]}, sentence("outside", box="5, -9, 7, 0")),
    "box NaN": ({"boxes": [(5, math.nan, 7, 9)]}, sentence("not-finite", index=1, row="5, nan, 7, 9")),
    "box infinite": ({"boxes": [(5, 5, math.inf, 9)]}, sentence("not-finite", row="inf")),
    "one box": ({"boxes": (1, 2, 3, 4)}, sentence("no-list")),
    "box of three": ({"boxes": [(1, 2, 3)]}, sentence("no-list")),
    "ragged": ({"boxes": [(1, 2, 3, 4), (1, 2)]}, sentence("no-numbers")),
    "words": ({"boxes": ["cat"]}, sentence("no-numbers")),
    "a word": ({"boxes": "cat"}, sentence("no-numbers")),
    "point right of it": ({"points": [(1, 1), (640.5, 3)]}, sentence("outside", index=2, x=640.5)),
    "point below it": ({"points": [(3, 481)]}, sentence("outside", y=481)),
    "negative point": ({"points": [(-0.1, 3)]}, sentence("outside", x=-0.1)),
    "point NaN": ({"points": [(math.nan, 3)]}, sentence("not-finite", kind="Point", index=1)),
    "points of three": ({"points": [(1, 2, 3)]}, sentence("no-list")),
    "fewer labels": (
        {"boxes": [(1, 1, 2, 2)] * 2, "box_labels": [True]},
        sentence("number-of-labels", singular="box", labels=1, count=2),
    ),
    "labels alone": (
        {"text": "cat", "point_labels": [True]},
        sentence("number-of-labels", singular="point", labels=1, count=0),
    ),
    "labels of two": ({"points": [(1, 1)], "point_labels": [2]}, sentence("wrong-labels")),
    "labels that are words": ({"points": [(1, 1)], "point_labels": ["yes"]}, sentence("wrong-labels")),
    "one label": ({"points": [(1, 1)], "point_labels": True}, sentence("wrong-labels")),
    "labels NaN": ({"points": [(1, 1)], "point_labels": [math.nan]}, sentence("wrong-labels")),
    "too many boxes": ({"boxes": [(1, 1, 2, 2)] * 6}, sentence("too-many", count=6, plural="boxes", limit=5)),
    "too many points": ({"points": [(1, 1)] * 5}, sentence("too-many", count=5, plural="points", limit=4)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name: str) -> None:
    asked, expected = BAD[name]
    with pytest.raises(ModelError, match=expected) as raised:
        encode(**asked)
    # What makes no sense for any image is told without one.
    with nullcontext() if expected.code == "outside" else pytest.raises(ModelError, match=expected):
        check_prompt(Prompt(**asked), CAPACITY, installed_tokenizer())
    message = str(raised.value)
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 200


def test_a_long_text_is_cut_as_upstream_does_and_it_says_so() -> None:
    encoded = encode(text="dog " * 100)
    np.testing.assert_array_equal(encoded.tokens, ids("dog " * 31))
    (note,) = encoded.notes
    assert "has 100 tokens; the model reads the first 30 and ignores the rest" in note
    assert len(note) < 160
    assert encode(text="dog " * 30).notes == ()


@pytest.mark.parametrize(
    "text", ["😀", "👩\u200d👩\u200d👧 🇨🇭", "кошка", "猫", "قطة", "बिल्ली", "naïve café", "!", "\ud800"]
)
def test_any_script_is_a_text(text: str) -> None:
    np.testing.assert_array_equal(encode(text=text).tokens, ids(text))


@examples(200)
@given(text=st.text(max_size=80))
def test_any_text_is_tokens_or_a_sentence(text: str) -> None:
    try:
        encoded = encode(text=text)
    except ModelError as error:
        assert "is empty" in str(error)
        assert not installed_tokenizer().encode(text)
    else:
        assert encoded.tokens.shape == (1, 32)
        assert all("\n" not in note for note in encoded.notes)

"""The composited clip: its masks are what its frames show, and its parts enter, hide and leave."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from harness.models.sam3.tracker.scene import SCENE, Part, Scene

pytestmark = pytest.mark.law


def test_frames_are_the_same_on_every_machine() -> None:
    """Pixels are copied from PNG files, so that this number depends on no library."""
    digest = hashlib.sha256()
    for frame in range(SCENE.length):
        digest.update(SCENE.picture(frame).tobytes() + SCENE.masks(frame).tobytes())
    assert digest.hexdigest() == "1dab32ac94886bf143317580ff12f3bd08377662e0a59910f957b488eedf86fc"


def test_parts_enter_hide_and_leave() -> None:
    areas = np.array([SCENE.masks(frame).sum(axis=(1, 2)) for frame in range(SCENE.length)])
    eye, cat, coffee = areas.T
    assert np.flatnonzero(eye == 0).tolist() == list(range(14, 26))
    assert (cat > 0).all()
    seen = np.flatnonzero(coffee)
    assert seen.tolist() == list(range(seen[0], seen[-1] + 1))
    assert seen[0] > 5
    assert seen[-1] < 33
    assert (cat < cat.max()).any(), "the coffee covers a part of the cat"


def test_a_pixel_belongs_to_one_part_and_shows_it() -> None:
    background = Scene(SCENE.background, SCENE.corner, SCENE.size, (), 1).picture(0)
    for frame in range(0, SCENE.length, 3):
        masks, picture = SCENE.masks(frame), SCENE.picture(frame)
        assert masks.shape == (3, 240, 424)
        assert (masks.sum(axis=0) <= 1).all()
        nothing = ~masks.any(axis=0)
        np.testing.assert_array_equal(picture[nothing], background[nothing])
        assert picture.dtype == np.uint8


def test_a_part_moves_as_its_path_says() -> None:
    cat: Part = SCENE.parts[1]
    middles = []
    for frame in range(SCENE.length):
        left, top = cat.place(frame)
        middles.append((left + cat.size[0] / 2, top + cat.size[1] / 2))
    assert middles[0] == (70, 120)
    assert middles[-1] == (350, 120)
    steps = np.diff(np.array(middles)[:, 0])
    assert set(steps.tolist()) == {7.0, 8.0}

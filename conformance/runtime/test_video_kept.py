"""What is kept of a frame is what was given, in an eighth of the memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from harness.runtime.sam3.video.outputs import FrameResult, VisibleObject

pytestmark = pytest.mark.law


@st.composite
def shown(draw: st.DrawFn) -> dict[int, VisibleObject]:
    """Objects of a frame of any size."""
    shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    ids = draw(st.lists(st.integers(0, 99), unique=True, max_size=4))
    scores = st.floats(-20, 20, width=32)
    return {each: VisibleObject(draw(arrays(np.bool_, shape)), draw(scores)) for each in ids}


@given(objects=shown(), gone=st.sets(st.integers(0, 99)))
def test_objects_come_back_as_they_were_given(objects: dict[int, VisibleObject], gone: set[int]) -> None:
    height, width = next(iter(objects.values())).mask.shape if objects else (2, 3)
    kept = FrameResult.pack(7, (width, height), objects, is_complete=True)
    assert kept.nbytes == len(objects) * -(-width * height // 8)
    for frame, expected in ((kept, set(objects)), (kept.drop_objects(gone), set(objects) - gone)):
        found = frame.objects
        assert set(found) == expected
        for number, each in found.items():
            np.testing.assert_array_equal(each.mask, objects[number].mask)
            assert each.tracker_score == objects[number].tracker_score

"""Frames of a video by their numbers: any order is as a list gives it, and no more than a piece is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.support.sentences import sentence
from harness.runtime.errors import ModelError
from harness.runtime.sam3.video.frames import CHUNK, FrameReader, Frames, open_frames

pytestmark = pytest.mark.law

LENGTH = 3 * CHUNK + 5
ROOT = Path(__file__).resolve().parents[2]


def picture(index: int) -> npt.NDArray[np.uint8]:
    return np.full((2, 3, 3), index, np.uint8)


class Counted:
    """Frames that count how often they are read."""

    def __init__(self, length: int = LENGTH) -> None:
        self.reads = 0
        self.frames = Frames("the list", self._read, length)

    def _read(self) -> Iterator[npt.NDArray[np.uint8]]:
        for index in range(self.frames.length or 0):
            self.reads += 1
            yield picture(index)


@given(order=st.lists(st.integers(0, LENGTH + 2), max_size=12))
def test_any_order_is_as_a_list_gives_it(order: list[int]) -> None:
    reader = FrameReader(Counted().frames)
    for index in order:
        found = reader.frame(index)
        if index < LENGTH:
            np.testing.assert_array_equal(found, picture(index))
        else:
            assert found is None


def test_forwards_each_frame_is_read_once_and_backwards_in_pieces() -> None:
    source = Counted()
    reader = FrameReader(source.frames)
    for index in range(LENGTH):
        for _ in range(2):
            np.testing.assert_array_equal(reader.frame(index), picture(index))
    assert source.reads == LENGTH
    for index in reversed(range(LENGTH - 1)):
        np.testing.assert_array_equal(reader.frame(index), picture(index))
    assert source.reads <= LENGTH + 4 * LENGTH, "once for each piece, and not once for each frame"


def test_a_stream_goes_on_and_not_back() -> None:
    reader = FrameReader(open_frames(iter([picture(index) for index in range(4)])))
    for index in (1, 1, 3):
        np.testing.assert_array_equal(reader.frame(index), picture(index))
    with pytest.raises(ModelError, match=sentence("frame-gone", index=1, name="the stream")):
        reader.frame(1)
    assert reader.frame(4) is None
    np.testing.assert_array_equal(reader.frame(3), picture(3))


def test_a_broken_frame_is_told_each_time_and_those_before_it_can_be_read() -> None:
    reader = FrameReader(open_frames([picture(0), np.zeros((4, 4, 3), np.uint8), picture(2)]))
    for _ in range(2):
        np.testing.assert_array_equal(reader.frame(0), picture(0))
        with pytest.raises(ModelError, match=sentence("frame-size", index=1, name="the list of frames", shape="4 x 4")):
            reader.frame(1)


class Interrupted:
    """Four pictures, of which reading the third is interrupted the first time."""

    def __init__(self) -> None:
        self.was_interrupted = False

    def __iter__(self) -> Iterator[npt.NDArray[np.uint8]]:
        for index in range(4):
            if index == 2 and not self.was_interrupted:
                self.was_interrupted = True
                raise KeyboardInterrupt
            yield picture(index)


def test_an_interrupted_read_is_not_the_end_of_the_video() -> None:
    source = Interrupted()
    reader = FrameReader(Frames("the list", lambda: (each for each in source), 4))
    with pytest.raises(KeyboardInterrupt):
        reader.frame(3)
    np.testing.assert_array_equal(reader.frame(3), picture(3))
    stream = FrameReader(open_frames(iter(Interrupted())))
    np.testing.assert_array_equal(stream.frame(1), picture(1))
    with pytest.raises(KeyboardInterrupt):
        stream.frame(3)
    np.testing.assert_array_equal(stream.frame(1), picture(1))
    for index in (2, 3):
        with pytest.raises(ModelError, match=sentence("stopped", name="the stream", position=2)):
            stream.frame(index)


def test_a_video_file_is_read_backwards() -> None:
    source = open_frames(ROOT / "fixtures" / "videos" / "bigbuckbunny.mp4")
    reader, expected = FrameReader(source), []
    for index, pixels in enumerate(source):
        if index == 40:
            break
        expected.append(pixels)
    for index in (39, 20, 19, 7, 8):
        np.testing.assert_array_equal(reader.frame(index), expected[index])

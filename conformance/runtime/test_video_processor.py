"""Frames that are fetched, which takes no model: what they leave behind, also when they are interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conformance.support.sentences import sentence
from harness.runtime.errors import ModelError
from harness.runtime.sam3.image_model import EncodedImage
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.video.detector import EncodedFrame
from harness.runtime.sam3.video.frames import Frames
from harness.runtime.sam3.video.masklets import Bucket
from harness.runtime.sam3.video.memory_bank import MemoryBank, Retention, tracked_entry
from harness.runtime.sam3.video.outputs import FrameResult, VisibleObject
from harness.runtime.sam3.video.processor import Action, Progress, Propagation, VideoProcessor
from harness.runtime.sam3.video.rules import DISAMBIGUATED, VideoState, state_after_click
from harness.runtime.sam3.video.session import Session

pytestmark = pytest.mark.law

NOTHING: Any = None
"""No model: nothing is computed where outputs are fetched."""
SIZE = (3, 2)
OBJECT = 3


class Video:
    """Two frames; reading the second one fails as it is told."""

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.frames = Frames("the list", self._read, 2)

    def _read(self) -> Iterator[npt.NDArray[np.uint8]]:
        yield np.zeros((2, 3, 3), np.uint8)
        if self.failure is not None:
            raise self.failure
        yield np.ones((2, 3, 3), np.uint8)


def fetching(video: Video) -> tuple[VideoProcessor, Propagation]:
    """A session of two texts that fetches an object, which hotstart removed from one and a user added to the other."""
    processor = VideoProcessor(NOTHING, NOTHING, video.frames, DISAMBIGUATED, keeps=True)
    progress = processor.progress = processor.new_progress([Prompt("dog"), Prompt("cup")], 0)
    one, other = progress.groups
    one.state, other.state = VideoState(removed=frozenset({OBJECT})), state_after_click(VideoState(), OBJECT, 0)
    shown = {OBJECT: VisibleObject(np.ones((2, 3), bool), 1.0)}
    progress.frame_results = {
        0: FrameResult.pack(0, SIZE, shown, is_complete=True),
        1: FrameResult.pack(1, SIZE, {}, is_complete=True),
    }
    progress.propagation = Propagation((None, None, False), Action("fetch"), range(2))
    return processor, progress.propagation


def test_an_object_that_is_tracked_again_under_the_id_of_one_that_was_removed_is_kept() -> None:
    processor, propagation = fetching(Video())
    processor.advance(propagation)
    ((output, _),) = propagation.outputs
    assert set(output.bits) == set(processor.progress.frame_results[0].bits) == {OBJECT}
    other = processor.progress.groups[1]
    other.state = replace(other.state, objects=())
    propagation.order = range(2)
    processor.advance(propagation)
    assert set(processor.progress.frame_results[0].bits) == set()


def test_an_interrupted_frame_is_still_to_be_processed() -> None:
    video = Video(KeyboardInterrupt())
    processor, propagation = fetching(video)
    with pytest.raises(KeyboardInterrupt):
        processor.advance(propagation)
    assert (propagation.order, propagation.outputs) == (range(2), ())
    video.failure = None
    for index in range(2):
        processor.advance(propagation)
        ((output, pixels),) = propagation.outputs
        assert output.index == index
        assert (pixels == index).all()
    assert not propagation.order


def test_whatever_is_wrong_with_the_next_frame_this_one_is_given_out() -> None:
    failure = OSError("the camera is gone")
    processor, propagation = fetching(Video(failure))
    processor.advance(propagation)
    assert [output.index for output, _ in propagation.outputs] == [0]
    assert propagation.failure is failure


class Computing(VideoProcessor):
    """Notes what is computed of which frame: `detected`, where detector and tracker run, and the ids `tracked`."""

    def __init__(self, frames: Frames) -> None:
        super().__init__(NOTHING, NOTHING, frames, DISAMBIGUATED, keeps=True)
        self.detected: list[int] = []
        self.tracked: list[tuple[int, set[int]]] = []

    def new_progress(self, prompts: Sequence[Prompt], frame: int) -> Progress:
        progress = super().new_progress(prompts, frame)
        progress.groups[0].refine = self.refined  # type: ignore[method-assign]
        progress.groups[0].state = state_after_click(state_after_click(VideoState(), OBJECT, frame), OBJECT + 1, frame)
        return progress

    def encode_frame(self, index: int) -> EncodedFrame:
        return EncodedFrame(index, EncodedImage(NOTHING, self.pixels(index), {}), {})

    def process(self, index: int, reverse: bool) -> FrameResult:
        self.detected.append(index)
        return self._keep(FrameResult.pack(index, SIZE, {}, is_complete=True))

    def refined(self, frame: EncodedFrame, ids: frozenset[int], *_: Any) -> dict[int, VisibleObject]:
        self.tracked.append((frame.index, set(ids)))
        return {each: VisibleObject(np.ones((2, 3), bool), 1.0) for each in ids}


def computing(length: int, *prompts: Prompt) -> tuple[Session, Computing]:
    """A session of two objects, which were found by a prompt or clicked on, on the first frame."""
    session = Session(NOTHING, NOTHING, [np.zeros((2, 3, 3), np.uint8)] * length, keep=True)
    processor = session.processor = Computing(session.frames)
    progress = processor.progress = processor.new_progress(prompts, 0)
    if not prompts:
        progress.history = (Action("add", frozenset({OBJECT, OBJECT + 1})),)
    return session, processor


def test_after_a_removal_frames_that_were_never_computed_show_the_other_objects() -> None:
    session, processor = computing(6)
    assert [each.ids.tolist() for each in session.propagate(limit=2)] == [[OBJECT, OBJECT + 1]] * 3
    session.remove_object(OBJECT)
    processor.tracked.clear()
    assert [(each.index, each.ids.tolist()) for each in session.propagate(start=2)] == [
        (index, [OBJECT + 1]) for index in (2, 3, 4, 5)
    ]
    assert processor.tracked == [(index, {OBJECT + 1}) for index in (3, 4, 5)], "what is kept is not computed again"
    assert [each.index for each in session.propagate(start=0)] == list(range(6))
    assert len(processor.tracked) == 3


def test_after_a_removal_a_text_is_looked_for_in_frames_that_were_never_computed() -> None:
    session, processor = computing(40, Prompt("dog"))
    assert len(list(session.propagate(limit=2))) == 3
    session.remove_object(OBJECT)
    processor.detected.clear()
    assert [each.index for each in session.propagate()] == list(range(40))
    assert processor.detected == list(range(3, 40))


def test_after_a_click_the_others_are_tracked_in_frames_that_were_never_computed() -> None:
    session, processor = computing(6)
    assert len(list(session.propagate(limit=2))) == 3
    progress = processor.progress
    processor.add_refined(processor.encode_frame(4), {OBJECT: VisibleObject(np.ones((2, 3), bool), 1.0)})
    progress.history += (Action("refine", frozenset({OBJECT})),)
    processor.tracked.clear()
    assert [each.ids.tolist() for each in session.propagate(start=1)] == [[OBJECT, OBJECT + 1]] * 5
    both = {OBJECT, OBJECT + 1}
    assert processor.tracked == [(1, {OBJECT}), (2, {OBJECT}), (3, both), (4, both), (5, both)]


def test_the_last_frames_of_all_that_a_limited_propagation_left_are_computed() -> None:
    session, processor = computing(6, Prompt("dog"))
    for start in (0, 3):
        assert [each.index for each in session.propagate(start=start, limit=2)] == list(range(start, start + 3))
    assert processor.detected == list(range(6))


def test_an_older_propagation_ends_where_something_else_was_asked() -> None:
    session = Session(NOTHING, NOTHING, Video().frames, keep=True)
    session.processor.progress.history = (Action("remove"),)
    older = session.propagate()
    assert next(older).index == 0
    assert [frame.index for frame in session.propagate(start=np.int64(1), limit=np.int64(0))] == [1]
    with pytest.raises(ModelError, match=sentence("interrupted")):
        next(older)


def test_a_frame_that_is_held_back_and_kept_is_counted_once() -> None:
    session = Session(NOTHING, NOTHING, Video().frames, keep=True)
    session.processor, propagation = fetching(Video())
    one = session.nbytes
    assert one > 0
    progress = session.processor.progress
    bits = dict.fromkeys((OBJECT, OBJECT + 1), progress.frame_results[0].bits[OBJECT])
    progress.frame_results[0] = replace(progress.frame_results[0], bits=bits)
    propagation.hotstart_buffer = ((progress.frame_results[0], np.zeros((2, 3, 3), np.uint8)),)
    group = progress.groups[1]
    group.state = state_after_click(group.state, OBJECT + 1, 0)
    assert session.nbytes == 2 * one
    session.remove_object(OBJECT + 1)
    assert session.nbytes == one


@pytest.mark.parametrize("retention", list(Retention))
def test_only_masks_that_are_remembered_are_cleared(retention: Retention) -> None:
    logits = np.ones((1, 1), np.float32)
    entry = tracked_entry(np.zeros((1, 256), np.float32), logits, logits)
    bank = MemoryBank((OBJECT,), retention).condition(0, entry, [OBJECT])
    for frame in (1, 2):
        bank = bank.track(frame, entry)
    masks = {frame: np.zeros((1, 288, 288), np.float32) for frame in (2, 3)}
    bucket, _, _ = Bucket(bank.condition(3, entry, [OBJECT]), masks).track_frame(
        NOTHING, EncodedFrame(3, NOTHING, {}), None, reverse=False
    )
    assert bucket.cleared_frames == {2}

"""Each rule of the video planner alone: against upstream's function, at its thresholds, and where it was repaired."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from conformance.support.examples import examples
from conformance.support.planned_video import PlannedVideo, members_by_bucket
from conformance.support.scripted_video import SIZE, Script
from conformance.support.sentences import sentence
from conformance.support.upstream_video import ScriptedTracker, UpstreamVideo
from conformance.support.video_fuzz import configurations
from harness.models.sam3.patches.patch import source
from harness.models.sam3.upstream import upstream
from harness.runtime.errors import ModelError
from harness.runtime.sam3.video.detector import Detections, select_detections, update_box_frames, video_scores
from harness.runtime.sam3.video.masks import mask_iou, nms, remove_mask_overlaps, suppress_shrunken, suppressed_objects
from harness.runtime.sam3.video.outputs import VisibleObject, frame_output, sigmoid
from harness.runtime.sam3.video.planner import plan_frame
from harness.runtime.sam3.video.processor import (
    Action,
    next_propagation,
    processing_order,
)
from harness.runtime.sam3.video.rules import (
    DISAMBIGUATED,
    UNDISAMBIGUATED,
    Rules,
    TrackedObject,
    VideoState,
    associate,
    count_shared_detections,
    drop_objects,
    is_young,
    limit_new_objects,
    release_outputs,
    removed_objects,
    select_reconditionings,
    state_after_click,
)

pytestmark = pytest.mark.law

MASKS = arrays(np.bool_, st.tuples(st.integers(0, 5), st.just(6), st.just(5)))
LOGITS = st.sampled_from([-12, -10, -4, -0.5, 0, 0.5, 2, 4]).map(np.float32)
SCORES = st.sampled_from([0.3, 0.5, 0.50000006, 0.69999993, 0.7, 0.70000005, 0.79999995, 0.8, 0.9]).map(np.float32)


def run(start: int, length: int) -> np.ndarray:
    """A mask of so many pixels from the start on, bool [12, 12]."""
    pixels = np.arange(SIZE * SIZE)
    return ((pixels >= start) & (pixels < start + length)).reshape(SIZE, SIZE)


def found(*masks: np.ndarray, scores: Any = None) -> Detections:
    stacked = np.array(masks, np.bool_).reshape(-1, SIZE, SIZE)
    given = np.full(len(stacked), 0.9, np.float32) if scores is None else np.float32(scores)
    return Detections(np.arange(len(stacked)), given, stacked, stacked.astype(np.float32))


def observed(frame: int, *masks: np.ndarray, detections: Detections | None) -> tuple[Any, ...]:
    """The arguments of `plan_frame` for a frame."""
    stacked = np.array(masks, np.bool_).reshape(-1, SIZE, SIZE)
    return frame, stacked, np.full(len(stacked), 5, np.float32), detections


class Scene(Script):
    """A video whose detections and tracked masks are given as functions; logits are 1 inside a mask and -1 outside."""

    def __init__(self, frames: int, detected: Any, tracked: Any) -> None:
        super().__init__(0)
        self.frames, self._detected, self._said = frames, detected, tracked

    def detections(self, frame: int) -> tuple[np.ndarray, np.ndarray]:
        masks = self._detected(frame)
        logits = np.full(max(1, len(masks)), 3 if masks else -3, np.float32)
        return logits, np.where(masks or [run(0, 0)], 1, -1).astype(np.float32)

    def tracked(self, frame: int, object_id: int) -> tuple[np.ndarray, np.float32]:
        return np.where(self._said(frame, object_id), 1, -1).astype(np.float32), np.float32(5)


def upstream_video(script: Script) -> UpstreamVideo:
    return UpstreamVideo(script, configurations()[0][0])


# Detections


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20))
@example([0.0, 1.0, 0.5, 0.001, 0.999])
def test_scores_pass_upstreams_logit_and_end_at_0_999(scores: list[float]) -> None:
    from sam3.model.model_misc import inverse_sigmoid

    ours = video_scores(np.float32(scores))
    theirs = inverse_sigmoid(torch.tensor(scores)).clamp(min=-10.0, max=10.0).sigmoid().numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-7)
    assert ours.min() >= np.float32(0.000999)
    assert ours.max() <= np.float32(0.999002)
    inside = (np.float32(scores) >= 0.0011) & (np.float32(scores) <= 0.9989)
    np.testing.assert_allclose(ours[inside], np.float32(scores)[inside], rtol=0, atol=1.2e-7)


@given(data=st.data(), masks=MASKS)
def test_detections_are_kept_as_upstream_keeps_them(data: Any, masks: np.ndarray) -> None:
    from sam3.perflib.nms import nms_masks

    scores = np.array(data.draw(st.lists(SCORES, min_size=len(masks), max_size=len(masks))), np.float32)
    logits = np.where(masks, 1, -1).astype(np.float32)
    theirs = nms_masks(torch.from_numpy(scores), torch.from_numpy(logits), 0.5, 0.1)
    ours = select_detections(scores, logits, DISAMBIGUATED)
    np.testing.assert_array_equal(ours.queries, np.flatnonzero(theirs.numpy()))
    np.testing.assert_array_equal(ours.scores, scores[ours.queries])
    np.testing.assert_array_equal(ours.masks, masks[ours.queries])


def test_an_iou_of_exactly_the_threshold_is_no_overlap_of_detections() -> None:
    scores, lengths = np.float32([0.8, 0.9]), (1, 10)
    masks = np.array([run(0, length) for length in lengths])
    assert nms(masks, scores, 0.5, 0.1).tolist() == [True, True]
    assert nms(masks, scores, 0.5, 0.0999).tolist() == [False, True]


# Association


@pytest.mark.parametrize(("length", "matched", "tracked"), [(1, False, False), (2, True, False), (9, True, False)])
def test_a_detection_matches_at_an_iou_of_0_1_and_tracks_at_0_5(length: int, matched: bool, tracked: bool) -> None:
    def at(length: int) -> Any:
        iou = mask_iou(run(0, length)[None], run(0, 20)[None])
        return associate(np.float32([0.9]), iou, [7], np.array([True]), DISAMBIGUATED)

    assert at(length).matches == (((7,),) if matched else ((),))
    assert at(length).new == (() if matched else (0,))
    assert at(length).unmatched == (() if tracked else (7,))
    assert at(10).unmatched == ()


def test_without_objects_every_detection_is_new_and_beside_one_only_scores_from_0_7() -> None:
    scores = np.float32([0.51, np.nextafter(np.float32(0.7), np.float32(0)), 0.7])
    none = associate(scores, np.empty((3, 0), np.float32), [], np.empty(0, np.bool_), DISAMBIGUATED)
    assert none.new == (0, 1, 2)
    one = associate(scores, np.zeros((3, 1), np.float32), [4], np.array([True]), DISAMBIGUATED)
    assert one.new == (2,)


def test_an_empty_object_is_not_unmatched() -> None:
    none = associate(np.empty(0, np.float32), np.empty((0, 2), np.float32), [4, 5], np.array([True, False]), Rules())
    assert (none.unmatched, none.empty) == ((4,), (5,))


def test_an_object_is_confirmed_by_the_last_detection_that_confirms_it() -> None:
    iou = np.float32([[0.9, 0.1], [0.8, 0.0], [0.79, 0.0]])
    both = associate(np.float32([0.8, 0.9, 0.9]), iou, [4, 5], np.ones(2, np.bool_), DISAMBIGUATED)
    assert both.confident == {4: 1}
    low = associate(np.float32([0.7999999, 0.7, 0.9]), iou, [4, 5], np.ones(2, np.bool_), DISAMBIGUATED)
    assert low.confident == {}


def test_places_go_to_the_best_scores_and_never_to_more_than_there_are() -> None:
    scores = np.float32([0.7, 0.9, 0.8])
    assert limit_new_objects([0, 1, 2], scores, 3) == (0, 1, 2)
    assert limit_new_objects([0, 1, 2], scores, 2) == (1, 2)
    assert limit_new_objects([0, 1, 2], scores, 0) == ()
    assert limit_new_objects([0, 1, 2], scores, -1) == ()


# Hotstart


@pytest.mark.parametrize("reverse", [False, True])
def test_an_object_is_young_for_15_frames(reverse: bool) -> None:
    ages = [age for age in range(40) if is_young(50, 50 + (-age if reverse else age), DISAMBIGUATED, reverse)]
    assert ages == list(range(15))


@given(born=st.integers(0, 20), times=st.integers(6, 9), age=st.integers(7, 16), reverse=st.booleans())
def test_eight_frames_without_a_detection_remove_a_young_object(born: int, times: int, age: int, reverse: bool) -> None:
    frame = born + 100 + (-age if reverse else age)
    unseen = TrackedObject(3, 0, born + 100, 0.9, unmatched=times)
    gone = removed_objects([unseen], {}, frame, DISAMBIGUATED, reverse)
    assert gone == (frozenset({3}) if times >= 8 and age < 15 else frozenset())
    twin = replace(unseen, unmatched=0)
    assert removed_objects([twin], {(1, 3): times}, frame, DISAMBIGUATED, reverse) == gone


def test_the_first_found_is_the_original_of_those_that_share_a_detection() -> None:
    first_frames = {4: 9, 5: 2, 6: 2}
    forwards = count_shared_detections(
        {(5, 4): 3}, [(4, 5, 6), (4,), (4, 5)], first_frames, DISAMBIGUATED, reverse=False
    )
    assert forwards == {(5, 4): 5, (5, 6): 1}
    assert count_shared_detections({}, [(4, 5, 6)], first_frames, DISAMBIGUATED, reverse=True) == {(4, 5): 1, (4, 6): 1}


def test_without_disambiguation_nothing_is_removed_forwards() -> None:
    unseen = TrackedObject(0, 0, 5, 0.9, unmatched=30)
    for frame in range(5, 40):
        assert not removed_objects([unseen], {(1, 0): 30}, frame, UNDISAMBIGUATED, reverse=False)


@given(frames=st.integers(1, 40), hotstart=st.sampled_from([0, 8, 15]))
def test_outputs_come_in_order_each_once_and_hotstart_frames_late(frames: int, hotstart: int) -> None:
    rules = replace(DISAMBIGUATED, hotstart_frames=hotstart)
    held: tuple[int, ...] = ()
    given_out = []
    for frame in range(frames):
        held, out = release_outputs(held, frame, frame == frames - 1, rules)
        given_out += [(each, frame) for each in out]
    assert [frame for frame, _ in given_out] == list(range(frames))
    for frame, when in given_out:
        assert when == min(frame + max(hotstart - 1, 0), frames - 1)


def test_a_removed_object_is_never_seen() -> None:
    """It is found on frame 3, and no detection shows it again: removed on frame 11, before frame 3 is given out."""
    ghost = run(100, 20)
    script = Scene(
        30, lambda frame: [run(0, 20), ghost] if frame == 3 else [run(0, 20)], lambda frame, i: [run(0, 20), ghost][i]
    )
    with upstream():
        for video in (upstream_video(script), PlannedVideo(script, DISAMBIGUATED)):
            video.prompt(0, True)
            outputs = video.propagate(0, None, False)
            assert [frame for frame, *_ in outputs] == list(range(30))
            assert all(ids == [0] for _, ids, *_ in outputs)
            assert [facts["frame"] for facts in video.recorded if facts["removed"] == [1]] == [11]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("age", "survivor"), [(14, 1), (15, 0)])
def test_hotstart_ends_with_the_14th_frame_after_a_birth(age: int, survivor: int, reverse: bool) -> None:
    """The eighth frame without a detection comes at this age; of a removed object its next detection is a new one."""
    missed = range(age - 7, age + 1)
    script = Scene(41, lambda frame: [] if abs(frame - 20) in missed else [run(0, 20)], lambda *_: run(0, 20))
    with upstream():
        theirs, ours = upstream_video(script), PlannedVideo(script, DISAMBIGUATED)
        for video in (theirs, ours):
            video.prompt(20, True)
            video.propagate(20, None, reverse)
    assert theirs.tracked == list(ours.state.ids) == [survivor]


# Reconditioning


def test_every_16th_frame_confident_detections_correct_objects_that_are_there() -> None:
    logits = {4: np.float32(0.8), 5: np.nextafter(np.float32(0.8), np.float32(1)), 6: np.float32(9)}
    for frame in range(50):
        corrected = select_reconditionings({6: 0, 4: 1, 5: 2}, logits, frame, DISAMBIGUATED)
        assert list(corrected.items()) == ([] if frame % 16 else [(6, 0), (5, 2)])
    assert select_reconditionings({6: 0}, logits, 16, UNDISAMBIGUATED) == {}


def test_the_memory_of_a_corrected_frame_is_of_the_trackers_mask() -> None:
    """Followed: upstream encodes the detection's mask and overwrites it (VB:755, VB:1500)."""
    script = Scene(18, lambda _: [run(0, 20)], lambda frame, _: run(0, 17) if frame == 16 else run(0, 20))
    with upstream():
        for video in (upstream_video(script), PlannedVideo(script, DISAMBIGUATED)):
            video.prompt(0, True)
            video.propagate(0, None, False)
            (facts,) = (facts for facts in video.recorded if facts["frame"] == 16)
            assert facts["reconditioned"] == [(0, run(0, 20).flatten().tolist())]
            ((masks, _),) = facts["encoded"]
            assert (np.array(masks) > 0).tolist() == run(0, 17).flatten().tolist()


# Overlaps


@examples(150)
@given(masks=MASKS, data=st.data(), reverse=st.booleans())
def test_overlaps_are_suppressed_as_upstream_suppresses_them(masks: np.ndarray, data: Any, reverse: bool) -> None:
    occluded = np.array(data.draw(st.lists(st.integers(-1, 3), min_size=len(masks), max_size=len(masks))), np.int64)
    model = SimpleNamespace(suppress_overlapping_based_on_recent_occlusion_threshold=0.7, rank=0)
    theirs = UpstreamVideo._get_objects_to_suppress_based_on_most_recently_occluded(
        model, torch.from_numpy(masks), torch.from_numpy(occluded), list(range(len(masks))), 5, reverse
    )
    ours = suppressed_objects(mask_iou(masks, masks), occluded, DISAMBIGUATED, reverse)
    np.testing.assert_array_equal(ours, theirs.numpy())


def test_two_masks_overlap_from_an_iou_of_0_7_on() -> None:
    for length, overlap in ((13, False), (14, True)):
        masks = np.array([run(0, 20), run(0, length)])
        hidden = suppressed_objects(mask_iou(masks, masks), np.array([3, 8]), DISAMBIGUATED, reverse=False)
        assert hidden.tolist() == [False, overlap]


def test_backwards_an_object_that_never_was_occluded_gives_way() -> None:
    """Followed: upstream takes -1, which says never, for the smallest frame (VB:1046)."""
    iou = np.ones((2, 2), np.float32)
    assert suppressed_objects(iou, np.array([-1, 8]), DISAMBIGUATED, reverse=False).tolist() == [False, False]
    assert suppressed_objects(iou, np.array([-1, 8]), DISAMBIGUATED, reverse=True).tolist() == [True, False]


def tracker() -> ScriptedTracker:
    return ScriptedTracker(Script(0))


@examples(150)
@given(arrays(np.float32, st.tuples(st.integers(1, 4), st.just(5), st.just(4)), elements=LOGITS))
def test_masks_shrink_as_upstreams_do(logits: np.ndarray) -> None:
    theirs = tracker()._suppress_object_pw_area_shrinkage(torch.from_numpy(logits)[:, None])
    np.testing.assert_array_equal(suppress_shrunken(logits), theirs[:, 0].numpy())


def test_an_object_that_keeps_three_tenths_of_its_pixels_stays() -> None:
    for lost, stays in ((7, True), (8, False)):
        logits = np.where([run(0, 10), run(0, lost)], np.float32([1, 2])[:, None, None], -1).astype(np.float32)
        assert (suppress_shrunken(logits)[0] > 0).any() == stays


@examples(150)
@given(masks=MASKS, data=st.data())
def test_pixels_go_to_the_highest_tracker_score_as_upstreams_do(masks: np.ndarray, data: Any) -> None:
    scores = np.array(data.draw(st.lists(LOGITS, min_size=len(masks), max_size=len(masks))), np.float32)
    ours = remove_mask_overlaps(masks, scores)
    assert (ours.sum(axis=0) <= 1).all() or len(masks) == 1
    if len(masks) > 1:
        theirs = tracker()._apply_object_wise_non_overlapping_constraints(
            torch.from_numpy(masks)[:, None], torch.from_numpy(scores)[:, None], background_value=0
        )
        np.testing.assert_array_equal(ours, theirs[:, 0].numpy() > 0)


# The plan of a frame


def test_the_state_before_a_frame_is_never_changed() -> None:
    state, _ = plan_frame(VideoState(), *observed(0, detections=found(run(0, 20), run(5, 20), run(60, 9))))
    before = repr(state)
    masks = (run(0, 20), run(0, 15), run(0, 0))
    detections = found(run(0, 20), run(120, 10))
    seen = observed(1, *masks, detections=detections)
    for array in (*seen[1:3], detections.masks, detections.scores):
        array.flags.writeable = False
    first, second = plan_frame(state, *seen), plan_frame(state, *seen)
    assert repr(state) == before
    assert first[0] == second[0] != state
    assert members_by_bucket(first[0]) == {0: [0, 1, 2], 1: [3]}


@pytest.mark.parametrize("asked", [True, False])
def test_a_frame_on_which_the_detector_was_not_asked_counts_against_nobody(asked: bool) -> None:
    """Repaired: upstream takes it for a frame without detections, and removes the object of a box (VI:393)."""
    script = Scene(20, lambda frame: [run(0, 20)] if frame == 0 else [], lambda *_: run(0, 20))
    with upstream():
        theirs = upstream_video(script)
        theirs.prompt(0, False)
        theirs.propagate(0, None, False)
    assert theirs.tracked == []

    state, _ = plan_frame(VideoState(), *observed(0, detections=found(run(0, 20))))
    lost = []
    for frame in range(1, 20):
        detections = found() if asked else None
        state, plan = plan_frame(state, *observed(frame, *[run(0, 20)] * len(state.ids), detections=detections))
        lost += [frame] * len(plan.removed)
        assert asked or (plan.association.empty, plan.association.unmatched) == ((), ())
    assert lost == ([8] if asked else [])


# Clicks


def unless_repaired(assertion: str) -> AbstractContextManager[object]:
    """Expects an assertion of upstream's session to fail; where it is gone, as in upstream's main, nothing fails."""
    is_there = assertion in source("model/sam3_video_inference.py")
    return pytest.raises(AssertionError, match=assertion) if is_there else nullcontext()


def test_points_before_any_propagation_add_an_object() -> None:
    """Repaired: upstream's assertion fails, after it has changed its state (VI:553)."""
    script = Scene(3, lambda _: [], lambda *_: run(0, 20))
    with upstream(), unless_repaired("No cached outputs found"):
        upstream_video(script).click(0, 1)

    state = state_after_click(VideoState(), 0, 1)
    assert state.objects == (TrackedObject(0, 0, 1, 1.0),)
    assert state.next_id == 1
    assert next_propagation([Action("add", frozenset({0}))], 3) == Action("partial", frozenset({0}))
    output = frame_output({0: VisibleObject(run(0, 20), 1.0)}, state.scores, (SIZE, SIZE))
    assert output.ids.tolist() == [0]
    assert output.scores.tolist() == [1.0]


def test_a_refinement_may_go_further_than_the_propagation_went() -> None:
    """Repaired: upstream's assertion fails on the first frame that was not processed (VI:553)."""
    script = Scene(6, lambda _: [run(0, 20)], lambda *_: run(0, 20))
    with upstream():
        theirs, ours = upstream_video(script), PlannedVideo(script, DISAMBIGUATED)
        for video in (theirs, ours):
            video.prompt(3, True)
            video.propagate(3, None, False)
            video.click(0, 4)
        with unless_repaired("No cached outputs found"):
            theirs.propagate(3, None, True)
        assert [(frame, ids) for frame, ids, *_ in ours.propagate(3, None, True)] == [(2, [0]), (1, [0]), (0, [0])]


def test_a_click_brings_a_removed_object_back_and_ids_are_never_given_twice() -> None:
    state = VideoState(next_id=5, removed=frozenset({3}))
    back = state_after_click(state, 3, 9)
    assert (back.removed, back.ids, back.next_id) == (frozenset(), (3,), 5)
    assert state_after_click(back, 8, 9).next_id == 9
    assert drop_objects(back, frozenset({3})).next_id == 5
    with pytest.raises(ModelError, match=sentence("negative", object_id=-1)):
        state_after_click(state, -1, 9)
    assert state_after_click(state, 2**62, 9).next_id < 2**63
    for too_large in (2**62 + 1, 2**64, 10**30):
        with pytest.raises(ModelError, match=sentence("too-large", object_id=too_large, largest_id=2**62)):
            state_after_click(state, too_large, 9)


def test_an_object_that_is_removed_going_backwards_may_be_hidden_where_it_was_seen_before() -> None:
    """Upstream shows it again when outputs are fetched, with a score of -10000; here it has none, and is left out."""
    objects = {0: VisibleObject(run(0, 20), 0.9), 1: VisibleObject(run(0, 9), 0.95)}
    both = frame_output(objects, {0: 0.8, 1: -1e4}, (SIZE, SIZE))
    assert both.ids.tolist() == [0, 1]
    one = frame_output(objects, {0: 0.8}, (SIZE, SIZE))
    assert one.ids.tolist() == [0]
    assert one.masks[0].sum() == 20


@given(arrays(np.float32, 7, elements=st.floats(-100, 100, width=32)))
def test_probabilities_are_upstreams(logits: np.ndarray) -> None:
    np.testing.assert_allclose(sigmoid(logits), torch.from_numpy(logits).sigmoid().numpy(), rtol=3e-7, atol=1e-37)


# Propagation

FRAMES = 6
ACTIONS = st.builds(
    Action,
    st.sampled_from(["add", "refine", "remove", "full", "partial", "fetch"]),
    st.frozensets(st.integers(0, 3), min_size=1, max_size=2),
    st.one_of(st.none(), st.integers(0, FRAMES - 1)),
)


@examples(150)
@given(st.lists(ACTIONS, max_size=5))
def test_the_history_decides_what_is_computed_as_upstreams_does(history: list[Action]) -> None:
    propagation = ("full", "partial", "fetch")
    told = [
        {
            "type": f"propagation_{each.kind}" if each.kind in propagation else each.kind,
            "frame_idx": each.start,
            "obj_ids": None if each.kind in ("full", "fetch") else list(each.objects),
        }
        for each in history
    ]
    history = [replace(each, objects=frozenset()) if each.kind in ("full", "fetch") else each for each in history]
    state = {"action_history": told, "num_frames": FRAMES}
    kind, objects = UpstreamVideo.parse_action_history_for_propagation(None, state)
    ours = next_propagation(history, FRAMES)
    assert (f"propagation_{ours.kind}", ours.objects) == (kind, frozenset(objects or ()))


@examples(150)
@given(
    start=st.one_of(st.none(), st.integers(0, FRAMES - 1)),
    limit=st.one_of(st.none(), st.integers(0, FRAMES + 2)),
    reverse=st.booleans(),
    processed=st.frozensets(st.integers(0, FRAMES - 1), min_size=1),
)
def test_frames_are_processed_in_upstreams_order(
    start: int | None, limit: int | None, reverse: bool, processed: frozenset[int]
) -> None:
    outputs = ["some" if each in processed else None for each in range(FRAMES)]
    state = {"num_frames": FRAMES, "previous_stages_out": outputs}
    theirs, end = UpstreamVideo._get_processing_order(None, state, start, limit, reverse)
    ours = processing_order(min(processed) if start is None else start, limit, FRAMES, reverse)
    assert list(ours) == list(theirs)
    assert not ours or ours[-1] == end


def test_a_negative_number_of_frames_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=sentence("negative", reach=-1)):
        processing_order(0, -1, 6, reverse=False)


@examples(60)
@given(st.lists(st.tuples(st.integers(0, FRAMES - 1), st.booleans()), min_size=1, max_size=8))
def test_the_detector_looks_one_frame_ahead_with_the_boxes_of_the_frame_before(asked: list[tuple[int, bool]]) -> None:
    script = Scene(FRAMES, lambda _: [], lambda *_: run(0, 0))
    known: dict[int, int] = {}
    with upstream():
        video = upstream_video(script)
        buffer: dict[int, Any] = {}
        for frame, reverse in asked:
            video.detector.asked.clear()
            before = dict(known)
            video.detector.forward_video_grounding_multigpu(
                backbone_out={},
                find_inputs=video.session["input_batch"].find_inputs,
                geometric_prompt=frame,
                frame_idx=frame,
                num_frames=FRAMES,
                multigpu_buffer=buffer,
                track_in_reverse=reverse,
            )
            known = update_box_frames(known, frame, FRAMES, reverse)
            assert set(known) == set(buffer)
            new = {each: prompt for each, prompt in known.items() if each not in before}
            assert new.items() <= dict(video.detector.asked).items()
            assert all(prompt == frame for _, prompt in video.detector.asked)

"""The tracker's memory: frame by frame against upstream's own state machine, whose networks are scripted.

`python -m conformance.support.tracker_memory --frames 100000` compares more frames than the suite does.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from conformance.support.examples import examples
from conformance.support.sentences import sentence
from conformance.support.tracker_memory import (
    NEAR_THE_THRESHOLD,
    SIZE,
    compare_forgetting,
    compare_plans,
    compare_session,
    scripted,
    scripted_tracker,
)
from harness.models.sam3.patches.patch import source
from harness.models.sam3.upstream import upstream
from harness.runtime.errors import ModelError
from harness.runtime.sam3.video.memory_bank import (
    HOTSTART,
    RULES,
    MemoryBank,
    MemoryEntry,
    MemoryRules,
    PromptOutput,
    Retention,
    closest_conditioning_frames,
    consolidate,
    effective_iou,
    plan_attention,
    tracked_entry,
)
from harness.runtime.sam3.video.tracker import from_bfloat16, to_bfloat16

SEEN = np.float32(0.5)
WITHOUT_SELECTION = MemoryRules(use_memory_selection=False)


def entry(number: float, objects: int = 1, encoded: bool = True) -> MemoryEntry:
    """A tracked frame with every object in it, whose arrays are a number."""
    memory = np.full((objects, 1), number, np.uint16) if encoded else None
    pointer = np.full((objects, 2), number, np.float32)
    return tracked_entry(pointer, np.full((objects, 1), 20, np.float32), np.ones((objects, 1), np.float32), memory)


def bank(frames: int, retention: Retention = Retention.EVERYTHING, objects: tuple[int, ...] = (1,)) -> MemoryBank:
    """Objects with a mask on frame 0 that are seen on each later one."""
    result = MemoryBank(objects, retention).condition(0, entry(0, len(objects)), objects)
    for frame in range(1, frames):
        result = result.track(frame, entry(frame, len(objects)))
    return result


# Against upstream, frame by frame


@pytest.mark.parametrize("memory_selection", [True, False])
@examples(20)
@given(random=st.randoms(use_true_random=False))
def test_every_frame_attends_to_what_upstream_attends_to(random: Random, memory_selection: bool) -> None:
    with scripted():
        compare_plans(random, memory_selection)


@pytest.mark.parametrize("memory_selection", [True, False])
@examples(30)
@given(random=st.randoms(use_true_random=False))
def test_sessions_of_clicks_masks_and_tracking_are_upstreams(random: Random, memory_selection: bool) -> None:
    with scripted():
        compare_session(random, memory_selection)


@pytest.mark.parametrize("seed", range(2))
def test_long_sessions_are_upstreams(seed: int) -> None:
    """What hypothesis draws is short; these are as long as they come."""
    random, frames = Random(seed), 0
    with scripted():
        while frames < 800:
            frames += compare_session(random, memory_selection=True)["frames"]


@pytest.mark.parametrize(("memory_selection", "rules"), [(True, RULES), (False, WITHOUT_SELECTION)])
def test_the_rules_have_upstreams_settings(memory_selection: bool, rules: MemoryRules) -> None:
    tracker, _ = scripted_tracker(memory_selection)
    of_sam_3_1 = {"use_maskmem_tpos_v2": False, "only_obj_ptrs_in_the_past_for_eval": True}
    assert vars(rules) == {name: getattr(tracker, name) for name in vars(rules).keys() - of_sam_3_1.keys()} | of_sam_3_1
    assert tracker.memory_temporal_stride_for_eval == 1
    assert not tracker.keep_first_cond_frame
    assert tracker.clear_non_cond_mem_around_input
    assert tracker.add_all_frames_to_correct_as_cond


# Single rules


def test_the_closest_conditioning_frames_come_before_after_and_then_by_distance() -> None:
    assert closest_conditioning_frames(10, [30, 2], 4) == (30, 2)
    assert closest_conditioning_frames(10, [30, 2, 8, 12, 14, 6], 4) == (8, 12, 14, 6)
    assert closest_conditioning_frames(10, [30, 2, 8, 12, 6, 14], 4) == (8, 12, 6, 14)
    assert closest_conditioning_frames(40, [1, 2, 3, 4, 5], 4) == (5, 4, 3, 2)
    assert closest_conditioning_frames(4, [8, 7, 6, 5, 4], 4) == (4, 5, 6, 7)


@pytest.mark.parametrize(("score", "valid"), zip(NEAR_THE_THRESHOLD, [False, True, False], strict=True))
def test_a_frame_is_valid_above_the_threshold_alone(score: np.float32, valid: bool) -> None:
    plan = plan_attention(5, [0], {2: score, 4: np.float32(0)})
    assert plan.memories == ((0, 6), *(((2, 1),) if valid else ()), (4, 0))


def test_pointers_stop_one_short_and_times_are_shares_of_the_longest() -> None:
    plan = plan_attention(20, [0], dict.fromkeys(range(1, 20), SEEN))
    assert plan.memories == ((0, 6), *((frame, 19 - frame) for frame in range(14, 20)))
    assert [frame for frame, _ in plan.pointers] == [0, *range(19, 5, -1)]
    assert [round(time * 15, 5) for _, time in plan.pointers] == [20, *range(1, 15)]
    last_invalid = plan_attention(20, [0], {**dict.fromkeys(range(1, 19), SEEN), 19: None})
    assert [frame for frame, _ in last_invalid.pointers] == [0, *range(19, 4, -1)]


def test_a_stream_is_as_a_long_video_and_a_short_clip_is_not() -> None:
    """Upstream's division by the length of a short clip is followed; a stream has no length to divide by."""
    scores = dict.fromkeys(range(1, 9), SEEN)
    stream = plan_attention(9, [0], scores)
    assert stream == plan_attention(9, [0], scores, num_frames=1000)
    clip = plan_attention(9, [0], scores, num_frames=10)
    assert clip.memories == stream.memories
    assert [time for _, time in clip.pointers] != [time for _, time in stream.pointers]
    assert clip.pointers[0] == (0, 1.0)


def test_upstream_cannot_track_a_stream() -> None:
    tracker, _ = scripted_tracker()
    with pytest.raises(TypeError, match="NoneType"):
        tracker.frame_filter({"non_cond_frame_outputs": {}}, False, 9, None, 1)


def test_the_only_frame_of_a_video_has_time_zero() -> None:
    """Upstream encodes 0 / 0 there, which is not a number."""
    assert plan_attention(0, [0], {}, num_frames=1).pointers == ((0, 0.0),)
    tracker, _ = scripted_tracker()
    with scripted():
        assert tracker._get_tpos_enc([0], "cpu", max_abs_pos=1).isnan().all()


def test_a_frame_that_cannot_be_tracked_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=sentence("nothing-to-track", frame=3)):
        plan_attention(3, [], {})


# Scores and rounding


@given(data=st.data(), objects=st.integers(1, 9), consolidated_frame=st.booleans())
def test_scores_are_upstreams(data: Any, objects: int, consolidated_frame: bool) -> None:
    values = st.floats(-40, 40, width=32)
    logits = data.draw(arrays(np.float32, (objects, 1), elements=values))
    shape = (objects, 1) if consolidated_frame else (objects,)
    iou = data.draw(arrays(np.float32, shape, elements=st.floats(0, 1, width=32)))
    theirs = scripted_tracker()[0].cal_mem_score(torch.from_numpy(logits), torch.from_numpy(iou))
    np.testing.assert_allclose(effective_iou(logits, iou), theirs.numpy(), rtol=2e-6, atol=1e-7)


def test_the_score_of_a_tracked_frame_is_a_product_of_means() -> None:
    """Upstream multiplies logits [B, 1] by IoU [B]: one object lowers the score of another, which is followed."""
    logits, iou = np.array([[20], [-5]], np.float32), np.array([0.5, 0], np.float32)
    assert effective_iou(logits, iou) == 0.125  # not the mean of the products, 0.25
    assert effective_iou(logits, iou[:, None]) == 0.25
    score = scripted_tracker()[0].cal_mem_score(torch.from_numpy(logits), torch.from_numpy(iou))
    assert float(score) == 0.125


@given(values=arrays(np.uint32, st.integers(0, 40), elements=st.integers(0, 2**32 - 1)))
def test_rounding_to_bfloat16_is_pytorchs(values: np.ndarray) -> None:
    floats = values.view(np.float32)
    with np.errstate(invalid="ignore"):
        peers = [floats.astype(ml_dtypes.bfloat16).astype(np.float32)]
    peers.append(torch.from_numpy(floats.copy()).bfloat16().float().numpy())
    rounded = from_bfloat16(to_bfloat16(floats))
    for peer in peers:
        np.testing.assert_array_equal(rounded, peer)
        assert np.array_equal(np.signbit(rounded[~np.isnan(rounded)]), np.signbit(peer[~np.isnan(peer)]))


def test_halves_are_rounded_to_even_and_the_largest_to_infinity() -> None:
    halves = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x80000000, 0x00008001], np.uint32)
    assert to_bfloat16(halves.view(np.float32)).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x8000, 0x0001]


# The bank


def test_a_bank_is_never_changed() -> None:
    before = bank(3)
    after = before.track(3, entry(3)).condition(3, entry(4), [1]).with_memory(3, np.zeros((1, 1), np.uint16)).remove(1)
    assert list(before.tracked) == [1, 2] and list(before.conditioning) == [0]
    assert after.objects == () and after.nbytes == 0 and after.latest is None


def test_a_conditioning_frame_is_no_longer_tracked_and_is_again_when_its_clicks_are_taken_back() -> None:
    conditioned = bank(4, objects=(1, 2)).condition(2, entry(9, 2), [1, 2])
    assert list(conditioned.conditioning) == [0, 2] and list(conditioned.tracked) == [1, 3]
    half = conditioned.clear(2, 1)
    assert half.inputs[2] == {2} and list(half.conditioning) == [0, 2]
    cleared = half.clear(2, 2)
    assert list(cleared.conditioning) == [0] and cleared.tracked[2].pointer[0, 0] == 9
    forgotten = cleared.clear(0, 1).clear(0, 2)
    assert forgotten.latest is None and forgotten.objects == (1, 2)


def test_a_memory_is_written_over() -> None:
    """Reconditioning leaves the pointer and the status of a frame; its memory is of the masks that were decided on."""
    reconditioned = bank(4).condition(3, entry(9), [1]).with_memory(3, np.full((1, 1), 7, np.uint16))
    assert reconditioned.conditioning[3].memory == 7
    assert reconditioned.conditioning[3].pointer[0, 0] == 9


def test_a_frame_without_memory_is_one_sentence() -> None:
    unfinished = bank(4).track(4, entry(4, encoded=False))
    with pytest.raises(ModelError, match=sentence("not-encoded", frame=4)):
        unfinished.read(unfinished.plan(5))
    forward = bank(4, Retention.FORWARD).track(4, entry(4, encoded=False))
    with pytest.raises(ModelError, match=sentence("not-encoded", frame=4)):
        forward.read(forward.plan(5))


def test_an_object_without_answer_keeps_what_was_known_of_it_or_counts_as_an_empty_mask() -> None:
    """The second half is repaired: upstream fails there."""
    answer = PromptOutput(
        np.ones((1, 2), np.float32), np.full((1, 1), 3, np.float32), np.array([[0.25, 0.5]], np.float32)
    )
    empty = np.full((1, 2), -1, np.float32)
    known = consolidate([4, 5], {5: answer}, entry(8, 2), empty)
    assert known.pointer.tolist() == [[8, 8], [1, 1]]
    assert known.object_logits.tolist() == [[20], [3]] and known.iou.tolist() == [[1], [0.5]]
    unknown = consolidate([4, 5], {5: answer}, None, empty)
    assert unknown.pointer.tolist() == [[-1, -1], [1, 1]]
    assert unknown.object_logits.tolist() == [[10], [3]] and unknown.iou.tolist() == [[0], [0.5]]
    assert unknown.memory is None and unknown.score is None


# What is forgotten


@pytest.mark.parametrize("memory_selection", [True, False])
@examples(15)
@given(random=st.randoms(use_true_random=False))
def test_what_is_forgotten_is_never_read_again(random: Random, memory_selection: bool) -> None:
    compare_forgetting(random, memory_selection)


@pytest.mark.parametrize("seed", range(2))
def test_what_is_forgotten_is_never_read_again_in_long_histories(seed: int) -> None:
    random = Random(seed)
    histories = [compare_forgetting(random, memory_selection=random.random() < 0.7) for _ in range(25)]
    assert sum(history["forgetting"] for history in histories) > 1000


def sizes(forward: MemoryBank) -> tuple[int, int, int]:
    """Frames with a memory, with a pointer, and known at all."""
    entries = (*forward.conditioning.values(), *forward.tracked.values())
    memories, pointers = ([getattr(each, name) is not None for each in entries] for name in ("memory", "pointer"))
    return sum(memories), sum(pointers), len(entries)


@pytest.mark.law
@pytest.mark.parametrize(("rules", "most"), [(RULES, (10, 19, 21)), (WITHOUT_SELECTION, (10, 19, 20))])
def test_an_object_takes_7_megabytes_however_long_the_video_is(rules: MemoryRules, most: tuple[int, ...]) -> None:
    memory, pointer = np.zeros((1, 64, 72, 72), np.uint16), np.zeros((1, 256), np.float32)
    seen = np.ones((1, 1), np.float32)
    forward = MemoryBank((1,), Retention.FORWARD, rules)
    largest = (0, 0, 0)
    for frame in range(0, 400):
        new = tracked_entry(pointer, 20 * seen, seen, memory)
        # The detector's masks come on every 16th frame.
        forward = forward.condition(frame, new, [1]) if frame % 16 == 0 else forward.track(frame, new)
        largest = max(largest, sizes(forward))
        assert forward.nbytes < 7e6
    assert largest == most


def test_a_bucket_is_kept_whole_while_objects_may_be_removed_and_is_small_afterwards() -> None:
    assert sizes(bank(HOTSTART + 1, Retention.FORWARD, (1, 2))) == (16, 16, 16)
    assert sizes(bank(HOTSTART + 2, Retention.FORWARD, (1, 2))) == (7, 16, 17)
    assert sizes(bank(HOTSTART + 2)) == (17, 17, 17)


def test_nothing_is_kept_that_no_later_frame_reads() -> None:
    kept = bank(40, Retention.FORWARD).condition(40, entry(40), [1])
    seen, numbers = entry(41), [np.full((1, 1), number, np.float32) for number in (41, -9, 1)]
    unseen = tracked_entry(*numbers, seen.memory)
    plans = [kept.track(41, new).plan(42) for new in (seen, unseen)]
    entries = {**kept.conditioning, **kept.tracked}
    memories = {frame for frame, each in entries.items() if each.memory is not None}
    pointers = {frame for frame, each in entries.items() if each.pointer is not None}
    assert memories == {frame for plan in plans for frame, _ in plan.memories} - {41}
    assert pointers == {frame for plan in plans for frame, _ in plan.pointers} - {41}
    # The oldest frame ends the scan and is not read itself.
    oldest = min(kept.tracked)
    assert {*entries} - pointers == {oldest}
    shorter = {frame: each for frame, each in kept.tracked.items() if frame != oldest}
    assert replace(kept, tracked=shorter).plan(41) != kept.plan(41)


@pytest.mark.parametrize("seed", range(3))
def test_a_late_removal_leaves_every_object_a_conditioning_frame(seed: int) -> None:
    """Upstream may read older frames then, which are gone; what is left is read, and nothing fails."""
    random = Random(seed)
    for _ in range(60):
        objects = (1, 2, 3)
        forward = MemoryBank(objects, Retention.FORWARD).condition(0, entry(0, 3), objects)
        for frame in range(1, random.randrange(HOTSTART + 2, 60)):
            logits = np.array([[random.choice([20, -3])] for _ in objects], np.float32)
            new = entry(frame, 3)
            new = tracked_entry(np.full((3, 2), frame, np.float32), logits, new.iou[:, None], new.memory)
            forward = forward.track(frame, new)
            if random.random() < 0.3:
                forward = forward.condition(frame, new, [random.choice(objects)])
        for removed in random.sample(objects, 2):
            forward = forward.remove(removed)
            attended = forward.read(forward.plan(60))
            assert len(attended.memories) and len(attended.pointers)
            assert attended.memories.shape[1] == attended.pointers.shape[1] == len(forward.objects)


def test_what_forward_tracking_forgets_is_told() -> None:
    forward = bank(30, Retention.FORWARD)
    for ask in (lambda: forward.plan(31, reverse=True), lambda: forward.plan(12)):
        with pytest.raises(ModelError, match=sentence("forward-only", latest=29)):
            ask()
    with pytest.raises(ModelError, match=sentence("clicks-stay", frame=0)):
        forward.clear(0, 1)
    for change in (lambda: forward.track(12, entry(12)), lambda: forward.condition(12, entry(12), [1])):
        with pytest.raises(ModelError, match=sentence("earlier-frame", frame=12, latest=29)):
            change()


# What upstream does


@pytest.mark.xfail(strict=True, reason="_clear_non_cond_mem_around_input clears per-object copies alone, TP:1314")
def test_upstream_clears_the_memories_around_a_correction() -> None:
    tracker, networks = scripted_tracker()
    with scripted():
        state = tracker.init_state(video_height=SIZE, video_width=SIZE, num_frames=20, cached_features={})
        number = np.ones((1, 2), np.float32)
        networks.answer = PromptOutput(number, number[:, :1], number[:, :1])
        tracker.add_new_mask(state, 0, 1, torch.ones(SIZE, SIZE))
        tracker.propagate_in_video_preflight(state)
        list(tracker.propagate_in_video(state, 0, 10, reverse=False, tqdm_disable=True))
        tracker.add_new_mask(state, 5, 1, torch.ones(SIZE, SIZE))
        tracker.propagate_in_video_preflight(state)
        assert not state["output_dict_per_obj"][0]["non_cond_frame_outputs"]
    assert not state["output_dict"]["non_cond_frame_outputs"]


@pytest.mark.xfail(
    "gt_masks=None" in source("model/sam3_tracking_predictor.py"),
    strict=True,
    raises=TypeError,
    reason="it passes arguments that track_step no longer has, TP:660; upstream's main has repaired that",
)
def test_upstream_makes_the_pointer_of_an_empty_mask() -> None:
    tracker, networks = scripted_tracker()
    with scripted():
        state = tracker.init_state(video_height=SIZE, video_width=SIZE, num_frames=2, cached_features={})
        networks.answer = PromptOutput(*(np.ones((1, n), np.float32) for n in (2, 1, 1)))
        type(tracker)._get_empty_mask_ptr(tracker, state, 0)


def test_the_pointer_of_an_empty_mask_is_a_weight() -> None:
    """`_use_mask_as_output` gives `no_obj_ptr` where a mask is empty, so `consolidate` is given that."""
    with upstream(), torch.no_grad():
        from sam3.model_builder import build_tracker

        tracker = build_tracker(apply_temporal_disambiguation=True).eval()
        high_res = [torch.randn(1, 32, 288, 288), torch.randn(1, 64, 144, 144)]
        pointer = tracker._use_mask_as_output(torch.randn(1, 256, 72, 72), high_res, torch.zeros(1, 1, 1152, 1152))[5]
    assert torch.equal(pointer, tracker.no_obj_ptr)

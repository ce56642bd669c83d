"""Defines the state of tracked objects, the thresholds, and the rules for detections and objects.

The rules are association, hotstart and reconditioning. The thresholds have the values of upstream's
`build_sam3_video_model`. In this package VB is sam3/model/sam3_video_base.py, VI is sam3/model/sam3_video_inference.py,
TP is sam3/model/sam3_tracking_predictor.py and MB is sam3/model_builder.py of sam3 0.1.4; a number after it is a line.
MX is model/sam3_multiplex_base.py of upstream's main branch of July 2026, which has SAM 3.1's rules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats
from harness.runtime.errors import ModelError

CLICKED_SCORE = 1.0
"""The score of an object that the user clicked (VI:1506)."""
LARGEST_ID = 2**62
"""The largest id that a user may choose: ids are int64, and objects that are found later get larger ids."""


@dataclass(frozen=True)
class TrackedObject:
    """A tracked object.

    Attributes:
        id: Its number, which is unique in the video.
        bucket: The number of its bucket. The objects of a bucket were found on one frame together, and share
            conditioning frames and selected memories (VB:1532); in SAM 3.1 they may share them with earlier ones.
        first_frame: The frame on which it was found.
        score: The score of the detection that it was found by, or 1 for a clicked object.
        unmatched: Number of frames on which no detection showed it though its mask had pixels.
        last_occluded: The frame on which its mask was last empty or suppressed, -1 if there is none; None before it has
            been tracked on a frame.
    """

    id: int
    bucket: int
    first_frame: int
    score: float
    unmatched: int = 0
    last_occluded: int | None = None


@dataclass(frozen=True)
class VideoState:
    """The planner's state between two frames. It is never changed; each frame has a new one.

    Attributes:
        objects: The tracked objects, bucket by bucket. Masks and scores of the tracker come in this order.
        next_id: The id of the next object that is found.
        next_bucket: The number of the next bucket.
        removed: Ids of the objects that hotstart removed; their outputs are hidden.
        duplicates: For (older object, younger object) the number of detections that they shared.
    """

    objects: tuple[TrackedObject, ...] = ()
    next_id: int = 0
    next_bucket: int = 0
    removed: frozenset[int] = frozenset()
    duplicates: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the tracked objects, in their order."""
        return tuple(item.id for item in self.objects)

    @property
    def scores(self) -> dict[int, float]:
        """The score of each tracked object."""
        return {item.id: item.score for item in self.objects}


def state_after_click(state: VideoState, object_id: int, frame: int) -> VideoState:
    """Returns the state after a click on a frame: a new object gets its own bucket, a tracked one is refined.

    Its score becomes 1, and an object that hotstart had removed comes back (VI:1478-1513). A new object may be added
    before anything was found, where upstream's assertion fails (VI:553). It has a first frame, which upstream omits.

    Raises:
        ModelError: The id is negative, or too large.
    """
    if object_id < 0:
        raise ModelError(f"The object id is {object_id}; give 0 or a larger number.")
    if object_id > LARGEST_ID:
        raise ModelError(f"The object id is {object_id}; give at most {LARGEST_ID}.")
    if object_id in state.ids:
        refined = (replace(item, score=CLICKED_SCORE) if item.id == object_id else item for item in state.objects)
        return replace(state, objects=tuple(refined))
    added = TrackedObject(object_id, state.next_bucket, frame, CLICKED_SCORE)
    return replace(
        state,
        objects=(*state.objects, added),
        next_id=max(state.next_id, object_id + 1),
        next_bucket=state.next_bucket + 1,
        removed=state.removed - {object_id},
    )


def drop_objects(state: VideoState, object_ids: frozenset[int]) -> VideoState:
    """Returns the state without some objects (VI:1277, VB:1591); counts shared with other objects stay."""
    return replace(
        state,
        objects=tuple(item for item in state.objects if item.id not in object_ids),
        duplicates={pair: count for pair, count in state.duplicates.items() if pair[1] not in object_ids},
    )


_CONFIDENT_SCORE = np.float32(0.8)
"""`HIGH_CONF_THRESH` (VB:1276)."""
Duplicates = Mapping[tuple[int, int], int]
"""Number of detections that (older object, younger object) have shared so far."""
_Output = TypeVar("_Output")
CLEARED_AROUND_CLICK = 16
"""`refinement_detector_cond_frame_removal_window` (VI:967)."""


@dataclass(frozen=True)
class Rules:
    """Upstream's configuration with temporal disambiguation (MB:716-740), which is its default.

    Scores are probabilities, IoU is of binary masks of 288 x 288 pixels.

    Attributes:
        detection_score: A detection counts if its score is above this.
        detection_iou: Of two detections whose IoU is above this, only the one with the higher score counts.
        matched_iou: A detection matches each object whose IoU with it is at least this.
        tracked_iou: An object is unmatched if its IoU with every detection is below this.
        new_score: A detection that matches no object becomes one if its score is at least this.
        hotstart_frames: The number of frames after its birth on which an object may be removed, and by which outputs
            are delayed.
        hotstart_unmatched: An object is removed once it was unmatched on this many frames.
        hotstart_duplicates: An object is removed once it shared this many detections with one older object.
        recondition_every: On frames whose number is a multiple of this, confident detections correct their objects; 0
            for never.
        overlap_iou: Of two objects whose IoU is at least this, the one that was occluded last may be suppressed.
        max_objects: New objects beyond this number are dropped, but upstream drops none of a single image (VB:561).
        confident_iou: A detection confirms the object of the highest IoU if this is at least this.
        present_logit: Confirmed objects whose logit is above this are corrected.
        border: A detection whose box has its center closer to the border of the frame does not count beside objects;
            as a share of width and height.
        largest_filled: Pixels of the largest hole that is filled, and of the largest part that is removed.
        multiplex: Whether SAM 3.1's forms of the rules apply, which `docs/design/video-rules.md` lists; overlaps of
            detections are then intersections over the smaller area.
    """

    detection_score: float = 0.5
    detection_iou: float = 0.1
    matched_iou: float = 0.1
    tracked_iou: float = 0.5
    new_score: float = 0.7
    hotstart_frames: int = 15
    hotstart_unmatched: int = 8
    hotstart_duplicates: int = 8
    recondition_every: int = 16
    overlap_iou: float = 0.7
    max_objects: int = 10_000
    confident_iou: float = 0.8
    present_logit: float = 0.8
    border: float = 0.0
    largest_filled: int = 16
    multiplex: bool = False


DISAMBIGUATED = Rules()
"""`apply_temporal_disambiguation=True` (MB:716-740)."""
MULTIPLEX = Rules(
    detection_score=0.4,
    new_score=0.65,
    confident_iou=0.5,
    present_logit=math.log(4),
    border=0.025,
    largest_filled=0,
    multiplex=True,
)
"""Those of `build_sam3_multiplex_video_predictor`, which builds SAM 3.1 and compares sigmoid(logit) with 0.8."""
UNDISAMBIGUATED = Rules(hotstart_frames=0, hotstart_unmatched=0, hotstart_duplicates=0, recondition_every=0)
"""`apply_temporal_disambiguation=False` (MB:743-767): no object is removed or corrected, and no output is delayed."""


@dataclass(frozen=True)
class Association:
    """The association of D detections with the tracked objects.

    Attributes:
        new: Indices of the detections that are new objects.
        unmatched: Ids of the objects that no detection shows.
        empty: Ids of the objects whose mask is empty; these are never unmatched.
        matches: For each detection the ids of the objects that it matches.
        confident: For each object that a detection confirms, the index of this detection.
    """

    new: tuple[int, ...] = ()
    unmatched: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()
    matches: tuple[tuple[int, ...], ...] = ()
    confident: Mapping[int, int] = field(default_factory=dict)


def associate(
    scores: Floats, iou: Floats, ids: Sequence[int], nonempty: npt.NDArray[np.bool_], rules: Rules
) -> Association:
    """Associates D detections with N tracked objects (`_associate_det_trk`, VB:1160-1293).

    - Without objects, every detection is a new one, also below `new_score` (VB:1194).
    - An object with an empty mask is empty and not unmatched (VB:1259).
    - An object is unmatched if its IoU with every detection is below `tracked_iou` (VB:1257).
    - A detection is new if its score is at least `new_score` and its IoU with every object is below `matched_iou`
      (VB:1267).
    - A detection matches each object whose IoU with it is at least `matched_iou` (VB:1285). An object may therefore be
      matched and unmatched on one frame.
    - A detection confirms the object of the highest IoU, if this is at least `confident_iou` and its score is at least
      0.8 (VB:1278-1288). The last detection that confirms an object is the one that counts.
    - In SAM 3.1 the first detections need `new_score`, too. A detection that shares `confident_iou` with several
      objects matches none of them, and no detection matches an object that shares it with several (MX:1899).

    Args:
        scores: fp32 [D].
        iou: fp32 [D, N], of detections with objects.
        ids: The objects' ids.
        nonempty: bool [N], whether an object's mask has pixels.
        rules: The thresholds.
    """
    object_ids = np.array(ids, np.int64)
    matched = iou >= np.float32(rules.matched_iou)
    is_new: npt.NDArray[np.bool_] = ~np.any(matched, axis=1)
    if len(ids) or rules.multiplex:
        is_new &= scores >= np.float32(rules.new_score)
    tracked = (iou >= np.float32(rules.tracked_iou)).any(axis=0)
    if rules.multiplex:
        close = iou >= np.float32(rules.confident_iou)
        ambiguous = (close.sum(axis=1) > 1)[:, None] | (close.sum(axis=0) > 1)
        iou = np.where(ambiguous, np.float32(0), iou)
        matched = iou >= np.float32(rules.matched_iou)
    return Association(
        new=tuple(np.flatnonzero(is_new).tolist()),
        unmatched=tuple(object_ids[nonempty & ~tracked].tolist()),
        empty=tuple(object_ids[~nonempty].tolist()),
        matches=tuple(tuple(object_ids[row].tolist()) for row in matched),
        confident=_confident(scores, iou, ids, is_new, rules),
    )


def _confident(
    scores: Floats, iou: Floats, ids: Sequence[int], is_new: npt.NDArray[np.bool_], rules: Rules
) -> dict[int, int]:
    """Returns, for each object that a detection confirms, the index of the last such detection; see `associate`.

    Args:
        scores: fp32 [D].
        iou: fp32 [D, N], of detections with objects.
        ids: The objects' ids.
        is_new: bool [D], whether a detection is a new object.
        rules: The thresholds.
    """
    if not iou.size:
        return {}
    confident = (scores >= _CONFIDENT_SCORE) & ~is_new & (iou.max(axis=1) >= np.float32(rules.confident_iou))
    best = iou.argmax(axis=1)
    return {ids[best[detection]]: detection for detection in np.flatnonzero(confident).tolist()}


def limit_new_objects(new: Sequence[int], scores: Floats, places: int) -> tuple[int, ...]:
    """Returns the new detections for which there are places, the best ones first if some are dropped.

    This is upstream's `_drop_new_det_with_obj_limit` (VB:1753).

    Args:
        new: Indices of the new detections.
        scores: fp32 [D], of all detections.
        places: How many more objects may be tracked.
    """
    if len(new) <= places:
        return tuple(new)
    order = np.argsort(scores[list(new)])[::-1]
    return tuple(new[index] for index in order[: max(0, places)])


def count_shared_detections(
    counted: Duplicates, matches: Iterable[Sequence[int]], first_frames: Mapping[int, int], rules: Rules, reverse: bool
) -> dict[tuple[int, int], int]:
    """Counts the detections that objects share, after one more frame (VB:1401-1418).

    Among the objects that a detection matches, the one that was found first is the original, and every other one shares
    a detection with it once more. If several were found together, the original is the first one in the order of
    tracking. Backwards, the object whose frame has the highest number was found first. Two detections that match the
    same pair count twice on one frame. In SAM 3.1 every two objects share the detection, and counts that were shared
    with an object that is not tracked any more are dropped (MX:2206).

    Args:
        counted: The counts before this frame.
        matches: For each detection the ids of the objects that it matches.
        first_frames: For each object the frame on which it was found.
        rules: Whether they are SAM 3.1's.
        reverse: Whether frames are processed backwards.
    """
    if rules.multiplex:
        shared = {pair: count for pair, count in counted.items() if first_frames.keys() >= {*pair}}
        for pair in (pair for objects in matches for pair in combinations(objects, 2)):
            shared[pair] = shared.get(pair, 0) + 1
        return shared
    counts = dict(counted)
    for objects in matches:
        if len(objects) < 2:
            continue
        original = (max if reverse else min)(objects, key=first_frames.__getitem__)
        for duplicate in objects:
            if duplicate != original:
                counts[original, duplicate] = counts.get((original, duplicate), 0) + 1
    return counts


def is_young(first_frame: int, frame: int, rules: Rules, reverse: bool) -> bool:
    """Returns whether an object that was found on `first_frame` may be removed on `frame` (VB:1336, 1382).

    Forwards, it was found less than `hotstart_frames` frames before. Objects that were found on later frames count as
    young, too; they exist where frames are processed again in another direction.
    """
    if reverse:
        return first_frame < frame + rules.hotstart_frames
    return first_frame > frame - rules.hotstart_frames


def removed_objects(
    objects: Iterable[TrackedObject], duplicates: Duplicates, frame: int, rules: Rules, reverse: bool
) -> frozenset[int]:
    """Returns the ids of the objects that are removed on this frame.

    A young object is removed if no detection showed it on `hotstart_unmatched` frames, which need not be consecutive
    (VB:1378-1392). It is also removed if it shared `hotstart_duplicates` detections with one object that was found
    before it (VB:1420-1433); in SAM 3.1 this may be any object that was found on another frame before it.

    Args:
        objects: The tracked objects, with the counts of this frame.
        duplicates: The result of `count_shared_detections`.
        frame: The number of this frame.
        rules: The thresholds. A threshold of 0, as without temporal disambiguation, counts as 1, but no object is young
            forwards.
        reverse: Whether frames are processed backwards.
    """
    objects = tuple(objects)
    young = {item.id: item for item in objects if is_young(item.first_frame, frame, rules, reverse)}
    found = {item.id: -item.first_frame if reverse else item.first_frame for item in objects}
    unmatched = {item.id for item in young.values() if item.unmatched >= max(1, rules.hotstart_unmatched)}
    repeated = {
        duplicate
        for (original, duplicate), count in duplicates.items()
        if duplicate in young and count >= max(1, rules.hotstart_duplicates)
        if not rules.multiplex or found[original] < found[duplicate]
    }
    return frozenset(unmatched | repeated)


def release_outputs(
    buffer: tuple[_Output, ...], output: _Output, last: bool, rules: Rules
) -> tuple[tuple[_Output, ...], tuple[_Output, ...]]:
    """Adds an output to the hotstart buffer; returns the new buffer and the outputs that leave it (VI:294-315).

    An output leaves the buffer when the buffer has `hotstart_frames` outputs. An object that is removed while it is
    young is thus never shown, if it was found in the same run. After the last frame all outputs leave.

    Args:
        buffer: The buffer, oldest output first.
        output: This frame's output.
        last: Whether this frame is the last one that is processed.
        rules: `hotstart_frames` is the size of the buffer; 0 means no buffer.

    Returns:
        The buffer, and the outputs that leave it.
    """
    buffered = (*buffer, output)
    if last or not rules.hotstart_frames:
        return (), buffered
    if len(buffered) >= rules.hotstart_frames:
        return buffered[1:], buffered[:1]
    return buffered, ()


def select_reconditionings(
    confident: Mapping[int, int], object_logits: Mapping[int, np.float32], frame: int, rules: Rules
) -> dict[int, int]:
    """Returns the objects that are corrected on this frame, in order, with the index of the detection of each.

    On every frame whose number is a multiple of `recondition_every` (VB:720), each object that a detection confirms
    gets this detection's mask, if the object's logit is above `present_logit` (VB:486), a probability that upstream
    compares with a logit in SAM 3. The whole bucket of the object becomes a
    conditioning frame (VB:497-508). The memory of this frame is nevertheless encoded from the tracker's masks, because
    upstream overwrites the memory of reconditioning (VB:755, VB:1500). Only the object's pointer and scores and the
    kind of the frame remain. This project follows it, because upstream's published accuracy was measured with it.

    Args:
        confident: For each confirmed object the index of a detection, see `Association`.
        object_logits: For each tracked object the logit of whether it is present.
        frame: The number of this frame.
        rules: The interval.
    """
    if not rules.recondition_every or frame % rules.recondition_every:
        return {}
    present = np.float32(rules.present_logit)
    return {object_id: detection for object_id, detection in confident.items() if object_logits[object_id] > present}


def cleared_by_click(masked: Collection[int], clicked: Collection[int], frame: int) -> tuple[int, ...]:
    """Returns the conditioning frames of a bucket that a click clears.

    These are frames within 16 of the clicked one on which the object has a detection's mask and no clicks
    (`clear_detector_added_cond_frame_in_tracker`, VI:1675).

    Args:
        masked: The frames on which the clicked object has a given mask.
        clicked: The frames on which it has clicks.
        frame: The frame of the click.
    """
    return tuple(index for index in masked if index not in clicked and abs(index - frame) <= CLEARED_AROUND_CLICK)

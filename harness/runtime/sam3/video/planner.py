"""The plan of a frame: what happens to detections and tracked objects, as one pure function.

This is `run_tracker_update_planning_phase` of upstream (VB:513-817), but for what it computes with the tracker. The
rules are in the modules that this one imports, and on one page in docs/VIDEO_RULES.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.runtime.errors import Sam3Error
from harness.runtime.sam3.video.association import Association, associate, limited
from harness.runtime.sam3.video.detections import Detections
from harness.runtime.sam3.video.hotstart import removed, shared_detections
from harness.runtime.sam3.video.masks import areas, mask_iou
from harness.runtime.sam3.video.objects import TrackedObject, VideoState, without
from harness.runtime.sam3.video.occlusion import ALWAYS_OCCLUDED, NEVER_OCCLUDED, occluded_by_now, suppressed
from harness.runtime.sam3.video.reconditioning import Reconditioning, reconditioned
from harness.runtime.sam3.video.rules import DISAMBIGUATED, Rules

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Observations:
    """What detector and tracker say of one frame, N objects being tracked.

    Attributes:
        frame: Its number.
        masks: bool [N, H, W], what the tracker predicts of each object, in the order of the state; small holes and
            sprinkles are gone already.
        object_logits: fp32 [N], whether each object is there, as the tracker says.
        detections: What the detector found, with masks bool [D, H, W]. None if it was not asked, which is on every
            frame without a prompt of a video whose only prompt is a box: then nothing counts against an object.
            Upstream takes it for a frame without detections (VI:393), so that hotstart removes every such object
            after 8 frames; to do as upstream, give detections of length 0.
        reverse: Whether frames are processed backwards.
    """

    frame: int
    masks: Masks
    object_logits: Floats
    detections: Detections | None
    reverse: bool = False


@dataclass(frozen=True)
class Birth:
    """A detection that becomes an object.

    Attributes:
        object_id: The object.
        detection: The index of the detection.
        score: Its score.
    """

    object_id: int
    detection: int
    score: float


@dataclass(frozen=True, eq=False)
class Plan:
    """What happens on a frame, in this order.

    Attributes:
        association: How detections and objects belong together.
        reconditionings: First, these objects get the mask of a detection.
        suppressed: bool [N], then the masks of these objects become empty, `SUPPRESSED_LOGIT` everywhere. What
            remains is encoded into memories, see `without_shrunken`, and is the frame's output.
        births: These detections become objects, in one bucket, tracked from the next frame on; their masks are
            output, too.
        removed: Last, these objects are tracked no longer.
        dropped: How many detections did not become objects because there are too many.
    """

    association: Association
    reconditionings: tuple[Reconditioning, ...]
    suppressed: Masks
    births: tuple[Birth, ...]
    removed: frozenset[int]
    dropped: int


def plan_frame(state: VideoState, seen: Observations, rules: Rules = DISAMBIGUATED) -> tuple[VideoState, Plan]:
    """Decides what happens on a frame.

    Args:
        state: What decides, after the frame before.
        seen: What detector and tracker say of this frame.
        rules: Thresholds and counts.

    Returns:
        The state after this frame, and the plan.

    Raises:
        Sam3Error: The observations do not belong to this state.
    """
    _check(state, seen)
    frame, reverse, scores = seen.frame, seen.reverse, _scores(seen)
    nonempty = areas(seen.masks) > 0
    association = _associated(state, seen, nonempty, rules)

    born = limited(association.new, scores, rules.max_objects - len(state.objects))
    births = tuple(
        Birth(state.next_id + place, detection, float(scores[detection])) for place, detection in enumerate(born)
    )

    objects = tuple(
        replace(each, unmatched=each.unmatched + (each.id in association.unmatched)) for each in state.objects
    )
    first_frames = {each.id: each.first_frame for each in objects}
    duplicates = shared_detections(state.duplicates, association.matches, first_frames, reverse)
    gone = removed(objects, duplicates, frame, rules, reverse)

    logits = dict(zip(state.ids, seen.object_logits, strict=True))
    reconditionings = reconditioned(association.confident, logits, frame, rules)

    before = _last_occluded(objects, gone)
    hidden = suppressed(mask_iou(seen.masks, seen.masks), before, rules, reverse)
    occluded = occluded_by_now(before, nonempty, hidden, frame).tolist()

    tracked = tuple(replace(each, last_occluded=when) for each, when in zip(objects, occluded, strict=True))
    found = tuple(TrackedObject(birth.object_id, state.next_bucket, frame, birth.score) for birth in births)
    after = VideoState(
        objects=tracked + found,
        next_id=state.next_id + len(births),
        next_bucket=state.next_bucket + bool(births),
        removed=state.removed | gone,
        duplicates=duplicates,
    )
    dropped = len(association.new) - len(births)
    return without(after, gone), Plan(association, reconditionings, hidden, births, gone, dropped)


def _associated(state: VideoState, seen: Observations, nonempty: Masks, rules: Rules) -> Association:
    if seen.detections is None:
        return Association(empty=tuple(np.array(state.ids, np.int64)[~nonempty].tolist()))
    iou = mask_iou(seen.detections.masks, seen.masks)
    return associate(seen.detections.scores, iou, state.ids, nonempty, rules)


def _scores(seen: Observations) -> Floats:
    return np.empty(0, np.float32) if seen.detections is None else seen.detections.scores


def _last_occluded(objects: tuple[TrackedObject, ...], gone: frozenset[int]) -> npt.NDArray[np.int64]:
    """When each object was last occluded, before this frame (VB:850-868).

    An object that is removed counts as always occluded only if it has not been tracked before, though upstream's
    docstring promises it for each removed object (VB:829). This project follows the code.
    """

    def when(each: TrackedObject) -> int:
        if each.last_occluded is not None:
            return each.last_occluded
        return ALWAYS_OCCLUDED if each.id in gone else NEVER_OCCLUDED

    return np.array([when(each) for each in objects], np.int64)


def _check(state: VideoState, seen: Observations) -> None:
    tracked = len(state.objects)
    if seen.frame < 0:
        raise Sam3Error(f"The frame is {seen.frame}; give 0 or a larger number.")
    if seen.masks.ndim != 3 or seen.masks.dtype != np.bool_ or len(seen.masks) != tracked:
        raise Sam3Error(
            f"The tracked masks are {seen.masks.dtype} {list(seen.masks.shape)}; give bool [{tracked}, height, width]."
        )
    if seen.object_logits.shape != (tracked,):
        raise Sam3Error(f"The object logits are {list(seen.object_logits.shape)}; give {tracked}, one for each object.")
    if seen.detections is None:
        return
    masks, scores = seen.detections.masks, seen.detections.scores
    if masks.ndim != 3 or masks.dtype != np.bool_ or masks.shape[1:] != seen.masks.shape[1:]:
        height, width = seen.masks.shape[1:]
        raise Sam3Error(
            f"The detections' masks are {masks.dtype} {list(masks.shape)}; give bool [detections, {height}, {width}]."
        )
    if scores.shape != masks.shape[:1]:
        raise Sam3Error(f"There are {len(masks)} detections and scores {list(scores.shape)}; give one score for each.")

"""Plans a frame as one pure function: what happens to detections and tracked objects.

This is `run_tracker_update_planning_phase` of upstream (VB:513-817), without its tracker computations. The rules are in
the modules that this one imports, and on one page in docs/design/video-rules.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats, Masks
from harness.runtime.sam3.video.detector import Detections
from harness.runtime.sam3.video.masks import (
    ALWAYS_OCCLUDED,
    NEVER_OCCLUDED,
    areas,
    mask_iou,
    suppressed_objects,
    update_last_occluded,
)
from harness.runtime.sam3.video.rules import (
    DISAMBIGUATED,
    Association,
    Rules,
    TrackedObject,
    VideoState,
    associate,
    count_shared_detections,
    drop_objects,
    limit_new_objects,
    removed_objects,
    select_reconditionings,
)


@dataclass(frozen=True, eq=False)
class FramePlan:
    """The plan of a frame, in this order.

    Attributes:
        association: The association of detections and objects.
        reconditionings: First, these objects get the mask of a detection, whose index is given.
        suppressed: bool [N], then the masks of these objects become empty, `SUPPRESSED_LOGIT` everywhere. The other
            masks are encoded into memories, see `suppress_shrunken`, and are the frame's output.
        births: The ids of new objects, and for each the index of the detection that becomes it. They are in one bucket,
            and tracked from the next frame on; the detections' masks are output, too.
        removed: Last, these objects are no longer tracked.
        dropped: How many detections did not become objects because there are too many.
    """

    association: Association
    reconditionings: Mapping[int, int]
    suppressed: Masks
    births: Mapping[int, int]
    removed: frozenset[int]
    dropped: int


def plan_frame(
    state: VideoState,
    frame: int,
    masks: Masks,
    object_logits: Floats,
    detections: Detections | None,
    *,
    rules: Rules = DISAMBIGUATED,
    reverse: bool = False,
) -> tuple[VideoState, FramePlan]:
    """Plans a frame with N tracked objects.

    Args:
        state: The state after the frame before.
        frame: Its number.
        masks: bool [N, H, W], the tracker's masks, in the order of the state, without small holes and sprinkles.
        object_logits: fp32 [N], the tracker's logit of whether each object is present.
        detections: The detections, with masks bool [D, H, W]. None if the detector did not run: in a video whose only
            prompt is a box it runs on the frame of the prompt alone, and then nothing counts against an object.
            Upstream assumes a frame without detections (VI:393), so that hotstart removes every such object after 8
            frames; detections of length 0 do as upstream.
        rules: Thresholds and counts.
        reverse: Whether frames are processed backwards.

    Returns:
        The state after this frame, and the plan.
    """
    nonempty = areas(masks) > 0
    if detections is None:
        scores = np.empty(0, np.float32)
        association = Association(empty=tuple(np.array(state.ids, np.int64)[~nonempty].tolist()))
    else:
        scores, iou = detections.scores, mask_iou(detections.masks, masks, smaller=rules.multiplex)
        inside = np.ones(len(scores), bool) if not state.ids or detections.at_border is None else ~detections.at_border
        association = associate(scores * inside, iou * inside[:, None], state.ids, nonempty, rules)

    new = limit_new_objects(association.new, scores, rules.max_objects - len(state.objects))
    births = dict(enumerate(new, start=state.next_id))

    objects = tuple(
        replace(item, unmatched=item.unmatched + (item.id in association.unmatched)) for item in state.objects
    )
    first_frames = {item.id: item.first_frame for item in objects}
    duplicates = count_shared_detections(state.duplicates, association.matches, first_frames, rules, reverse)
    removed = removed_objects(objects, duplicates, frame, rules, reverse)

    logits = dict(zip(state.ids, object_logits, strict=True))
    reconditionings = select_reconditionings(association.confident, logits, frame, rules)

    last_occluded = _last_occluded(objects, removed, rules)
    if rules.multiplex and detections is not None:
        masks = masks.copy()
        for object_id, detection in reconditionings.items():
            masks[state.ids.index(object_id)] = detections.masks[detection]
        nonempty = areas(masks) > 0
    suppressed = suppressed_objects(mask_iou(masks, masks), last_occluded, rules, reverse)
    occluded = update_last_occluded(last_occluded, nonempty, suppressed, frame).tolist()

    tracked = tuple(
        replace(item, last_occluded=occluded_on) for item, occluded_on in zip(objects, occluded, strict=True)
    )
    born = tuple(
        TrackedObject(object_id, state.next_bucket, frame, float(scores[detection]))
        for object_id, detection in births.items()
    )
    next_state = VideoState(
        objects=tracked + born,
        next_id=state.next_id + len(births),
        next_bucket=state.next_bucket + bool(births),
        removed=state.removed | removed,
        duplicates=duplicates,
    )
    dropped = len(association.new) - len(births)
    return drop_objects(next_state, removed), FramePlan(
        association, reconditionings, suppressed, births, removed, dropped
    )


def _last_occluded(objects: tuple[TrackedObject, ...], removed: frozenset[int], rules: Rules) -> npt.NDArray[np.int64]:
    """Returns the frame of each object's last occlusion, before this frame (VB:850-868).

    A removed object counts as always occluded only if it has not been tracked before, though upstream's docstring
    promises it for each removed object (VB:829). This project follows the code; SAM 3.1's keeps the promise (MX:1479).
    """

    def frame_of(item: TrackedObject) -> int:
        if item.last_occluded is not None and not (rules.multiplex and item.id in removed):
            return item.last_occluded
        return ALWAYS_OCCLUDED if item.id in removed else NEVER_OCCLUDED

    return np.array([frame_of(item) for item in objects], np.int64)

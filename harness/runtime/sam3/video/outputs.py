"""The output of a frame: the objects that are shown, their boxes, and which of them owns a pixel (VI:427-521)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.masks import boxes_of_masks
from harness.runtime.sam3.video.objects import VideoState
from harness.runtime.sam3.video.occlusion import without_overlaps
from harness.runtime.sam3.video.planner import Plan

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ShownObject:
    """An object on a frame.

    Attributes:
        mask: bool [height, width] of the video.
        tracker_score: Probability that the object is on this frame, as the tracker says. That of a new object is its
            score, and that of a clicked object on the frame of the click is 1.
    """

    mask: Masks
    tracker_score: float


@dataclass(frozen=True, eq=False)
class FrameOutput:
    """The n objects that are shown on a frame, by rising id.

    Attributes:
        ids: int64 [n].
        scores: fp32 [n], those of the detections that the objects were found by; 1 for one that was clicked on.
        boxes: fp32 [n, 4]: left, top, width and height, as shares of the video's width and height. A box spans from
            the first pixel to the last one of a mask, and is thus one pixel narrower and lower than it. It includes
            what the mask loses to others.
        masks: bool [n, height, width]; no pixel belongs to several of them.
    """

    ids: npt.NDArray[np.int64]
    scores: Floats
    boxes: Floats
    masks: Masks


def shown_objects(
    state: VideoState, plan: Plan, tracked: Masks, tracker_scores: Floats, found: Masks
) -> dict[int, ShownObject]:
    """The objects of a frame: the tracked ones with the tracker's masks, the new ones with their detections' (VB:937).

    An object that is removed on this frame is among them; the `removed` of the state after it hides it.

    Args:
        state: The state before the frame.
        plan: The frame's plan.
        tracked: bool [N, height, width] in the video's size, after the suppression that the plan asks for.
        tracker_scores: fp32 [N], the `sigmoid` of what the tracker says of each object.
        found: bool [births, height, width] in the video's size, holes filled and sprinkles removed.
    """
    shown = {
        object_id: ShownObject(mask, float(score))
        for object_id, mask, score in zip(state.ids, tracked, tracker_scores, strict=True)
    }
    return shown | {
        birth.object_id: ShownObject(mask, birth.score) for birth, mask in zip(plan.births, found, strict=True)
    }


def frame_output(
    objects: Mapping[int, ShownObject],
    scores: Mapping[int, float],
    size: tuple[int, int],
) -> FrameOutput:
    """What is given out of a frame.

    Objects with empty masks and those without a score, which are not tracked now, are left out (VI:465-479). Boxes are
    made of the masks (VI:489). Then each pixel goes to the object whose tracker score is the highest (VI:504).

    Args:
        objects: The objects of the frame by id.
        scores: The score of each object that is tracked now, see `VideoState.scores`.
        size: Width and height of the video.
    """
    width, height = size
    ids = [each for each in sorted(objects) if each in scores and objects[each].mask.any()]
    masks = np.array([objects[each].mask for each in ids], np.bool_).reshape(-1, height, width)
    tracker_scores = np.array([objects[each].tracker_score for each in ids], np.float32)
    return FrameOutput(
        ids=np.array(ids, np.int64),
        scores=np.array([scores[each] for each in ids], np.float32),
        boxes=boxes(masks),
        masks=without_overlaps(masks, tracker_scores),
    )


def refined_object(mask: Masks, object_logit: float) -> ShownObject:
    """An object as a partial propagation shows it; its tracker score is the logit itself, as upstream's (VI:1141).

    Beside the probabilities of other objects, a logit above 1 wins every pixel and a negative one none. This project
    follows it.
    """
    return ShownObject(mask, float(object_logit))


def with_refined(kept: Mapping[int, ShownObject] | None, refined: Mapping[int, ShownObject]) -> dict[int, ShownObject]:
    """The objects of a frame after some were refined, the others as they were kept (`_build_tracker_output`, VI:550).

    Of a frame that no propagation has reached nothing was kept, and the refined objects are shown alone. There
    upstream's assertion fails (VI:553): for points before any propagation, and where a refinement goes further than
    the propagation went.
    """
    return {**(kept or {}), **refined}


def boxes(masks: Masks) -> Floats:
    """Boxes of masks [n, height, width] that are not empty, fp32 [n, 4] as in `FrameOutput` (VI:489-500)."""
    _, height, width = masks.shape
    corners = boxes_of_masks(masks)
    corners[:, 2:] -= corners[:, :2]
    return np.asarray(corners / np.array([width, height, width, height], np.float32), np.float32)


def sigmoid(logits: Floats) -> Floats:
    """Probabilities fp32 of logits, in a form that does not overflow."""
    odds = np.exp(-np.abs(logits.astype(np.float64)))
    return np.asarray(np.where(logits < 0, odds, 1) / (1 + odds), np.float32)

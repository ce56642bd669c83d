"""Associates the detections of a frame with tracked objects, and finds the detections that are new objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.rules import Rules

Floats = npt.NDArray[np.float32]

_CONFIDENT_SCORE, _CONFIDENT_IOU = np.float32(0.8), np.float32(0.8)
"""`HIGH_CONF_THRESH` and `HIGH_IOU_THRESH` (VB:1276)."""


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
    - A detection confirms the object of the highest IoU, if this is at least 0.8 and so is its score (VB:1278-1288).
      The last detection that confirms an object is the one that counts.

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
    if len(ids):
        is_new &= scores >= np.float32(rules.new_score)
    tracked = (iou >= np.float32(rules.tracked_iou)).any(axis=0)
    return Association(
        new=tuple(np.flatnonzero(is_new).tolist()),
        unmatched=tuple(object_ids[nonempty & ~tracked].tolist()),
        empty=tuple(object_ids[~nonempty].tolist()),
        matches=tuple(tuple(object_ids[row].tolist()) for row in matched),
        confident=_confident(scores, iou, ids, is_new),
    )


def _confident(scores: Floats, iou: Floats, ids: Sequence[int], is_new: npt.NDArray[np.bool_]) -> dict[int, int]:
    if not iou.size:
        return {}
    confident = (scores >= _CONFIDENT_SCORE) & ~is_new & (iou.max(axis=1) >= _CONFIDENT_IOU)
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

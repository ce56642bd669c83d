"""Applies reconditioning: on some frames confident detections correct their objects (VB:453-511, 720-734)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from harness.runtime.sam3.video.rules import Rules

_PRESENT = np.float32(0.8)
"""`HIGH_CONF_THRESH` of `_recondition_masklets` (VB:475), which upstream compares with a logit."""
CLEARED_AROUND_CLICK = 16
"""`refinement_detector_cond_frame_removal_window` (VI:967)."""


@dataclass(frozen=True)
class Reconditioning:
    """An object that gets the mask of a detection, as if the user had given the mask.

    Attributes:
        object_id: The object.
        detection: The index of the detection.
    """

    object_id: int
    detection: int


def select_reconditionings(
    confident: Mapping[int, int], object_logits: Mapping[int, np.float32], frame: int, rules: Rules
) -> tuple[Reconditioning, ...]:
    """Returns the objects that are corrected on this frame, in order.

    On every frame whose number is a multiple of `recondition_every` (VB:720), each object that a detection confirms
    gets this detection's mask, if the object's logit is above 0.8 (VB:486). The whole bucket of the object becomes a
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
        return ()
    return tuple(
        Reconditioning(object_id, detection)
        for object_id, detection in confident.items()
        if object_logits[object_id] > _PRESENT
    )


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

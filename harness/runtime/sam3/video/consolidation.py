"""A conditioning frame of a bucket is put together from the answers to clicks and masks of single objects.

TP is upstream's `model/sam3_tracking_predictor.py`, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.runtime.sam3.video.memory_bank import Array, Entry
from harness.runtime.sam3.video.memory_scores import Floats

MISSING_MASK_LOGIT = np.float32(-1024)
"""`NO_OBJ_SCORE`: the mask, before its memory is encoded, of an object of which a frame knows nothing (TP:530)."""
MISSING_OBJECT_LOGIT = np.float32(10)
"""Upstream takes such an object to be there (TP:544), although its mask is empty."""
MISSING_IOU = np.float32(0)
"""The IoU of such an object (TP:550)."""


@dataclass(frozen=True, eq=False)
class Answer:
    """What the model answers to the clicks or the mask of one object on a frame.

    Attributes:
        pointer: fp32 [1, 256].
        object_logits: fp32 [1, 1].
        iou: fp32 [1, n] of the masks that it chose among; 1 for a mask that is given.
    """

    pointer: Array
    object_logits: Floats
    iou: Floats


def consolidated(
    objects: Sequence[int], answers: Mapping[int, Answer], earlier: Entry | None, empty_pointer: Array
) -> Entry:
    """The entry of a frame without its memory (`_consolidate_temp_output_across_obj`, TP:491).

    An object that was not asked for keeps what the frame knew of it. An object of which it knew nothing gets the
    pointer of an empty mask, which is the weight `no_obj_ptr`. There upstream fails, because `_get_empty_mask_ptr`
    passes arguments that `track_step` no longer has (TP:660), so objects cannot be clicked on different frames. This is
    repaired.

    Args:
        objects: The ids of the bucket, in order.
        answers: By id.
        earlier: What was remembered of the frame; None if nothing was.
        empty_pointer: fp32 [1, 256].
    """
    known = None if earlier is None else earlier.pointer
    best = {each: answer.iou.max(axis=-1) for each, answer in answers.items()}
    unknown_logit, unknown_iou = np.full((1, 1), MISSING_OBJECT_LOGIT), np.full((1, 1), MISSING_IOU)
    return Entry(
        memory=None,
        pointer=merged(objects, {each: a.pointer for each, a in answers.items()}, known, empty_pointer),
        object_logits=merged(
            objects,
            {each: a.object_logits for each, a in answers.items()},
            None if earlier is None else earlier.object_logits,
            unknown_logit,
        ),
        iou=merged(
            objects,
            {each: values.reshape(1, 1) for each, values in best.items()},
            None if earlier is None else earlier.iou.reshape(-1, 1),
            unknown_iou,
        ),
    )


def merged(objects: Sequence[int], given: Mapping[int, Array], earlier: Array | None, unknown: Array) -> Array:
    """One row for each object: what is given, otherwise its row of what was known before, otherwise the unknown one.

    Args:
        objects: The ids, in order.
        given: [1, …] by id.
        earlier: [B, …] or None.
        unknown: [1, …].
    """
    before = [unknown] * len(objects) if earlier is None else [earlier[row : row + 1] for row in range(len(objects))]
    return np.concatenate([given.get(each, row) for each, row in zip(objects, before, strict=True)])

"""Consolidates the answers to clicks and masks of single objects into a conditioning frame of a bucket.

TP is upstream's `model/sam3_tracking_predictor.py`, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.runtime.sam3.video.memory_bank import Array, MemoryEntry
from harness.runtime.sam3.video.memory_selection import Floats

MISSING_MASK_LOGIT = np.float32(-1024)
"""`NO_OBJ_SCORE`: the mask logits, before the memory is encoded, of an object without an output on a frame (TP:530)."""
MISSING_OBJECT_LOGIT = np.float32(10)
"""The object logit of such an object; upstream assumes that it is present (TP:544), although its mask is empty."""
MISSING_IOU = np.float32(0)
"""The IoU of such an object (TP:550)."""


@dataclass(frozen=True, eq=False)
class PromptOutput:
    """The model's output for the clicks or the mask of one object on a frame.

    Attributes:
        pointer: fp32 [1, 256].
        object_logits: fp32 [1, 1].
        iou: fp32 [1, n] of the masks that were candidates; 1 for a given mask.
    """

    pointer: Array
    object_logits: Floats
    iou: Floats


def consolidate(
    objects: Sequence[int], outputs: Mapping[int, PromptOutput], previous: MemoryEntry | None, empty_pointer: Array
) -> MemoryEntry:
    """Returns the memory entry of a frame without its memory (`_consolidate_temp_output_across_obj`, TP:491).

    An object without an output keeps the frame's earlier output. An object without either gets the pointer of an empty
    mask, which is the weight `no_obj_ptr`. Upstream fails there, because `_get_empty_mask_ptr` passes arguments that
    `track_step` no longer has (TP:660), so that objects cannot be clicked on different frames. This is repaired.

    Args:
        objects: The ids of the bucket, in order.
        outputs: By id.
        previous: The earlier entry of the frame; None if there is none.
        empty_pointer: fp32 [1, 256].
    """
    previous_pointer = None if previous is None else previous.pointer
    best = {object_id: output.iou.max(axis=-1) for object_id, output in outputs.items()}
    missing_logit, missing_iou = np.full((1, 1), MISSING_OBJECT_LOGIT), np.full((1, 1), MISSING_IOU)
    return MemoryEntry(
        memory=None,
        pointer=merge_rows(
            objects,
            {object_id: output.pointer for object_id, output in outputs.items()},
            previous_pointer,
            empty_pointer,
        ),
        object_logits=merge_rows(
            objects,
            {object_id: output.object_logits for object_id, output in outputs.items()},
            None if previous is None else previous.object_logits,
            missing_logit,
        ),
        iou=merge_rows(
            objects,
            {object_id: values.reshape(1, 1) for object_id, values in best.items()},
            None if previous is None else previous.iou.reshape(-1, 1),
            missing_iou,
        ),
    )


def merge_rows(objects: Sequence[int], rows: Mapping[int, Array], previous: Array | None, default: Array) -> Array:
    """Merges one row for each object: its given row, otherwise its earlier row, otherwise the default row.

    Args:
        objects: The ids, in order.
        rows: [1, …] by id.
        previous: [B, …] or None.
        default: [1, …].
    """
    defaults = (
        [default] * len(objects)
        if previous is None
        else [previous[number : number + 1] for number in range(len(objects))]
    )
    return np.concatenate([rows.get(object_id, row) for object_id, row in zip(objects, defaults, strict=True)])

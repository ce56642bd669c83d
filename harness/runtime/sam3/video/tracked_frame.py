"""What is given out of a frame."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.kept import KeptFrame
from harness.runtime.sam3.video.masklets import Masklets
from harness.runtime.sam3.video.outputs import frame_output

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class TrackedFrame:
    """A frame and the n objects that are shown in it, by rising id.

    Attributes:
        index: Number of the frame.
        pixels: uint8 [h, w, 3].
        ids: int64 [n].
        scores: fp32 [n], of the detections that the objects were found by; 1 for one that was clicked on.
        boxes: fp32 [n, 4], (x0, y0, x1, y1) in pixels.
        masks: bool [n, h, w]; no pixel belongs to several objects of one text.
        texts: The text that each object was found by; None where a box or a click said what it is.
    """

    index: int
    pixels: Pixels
    ids: npt.NDArray[np.int64]
    scores: Floats
    boxes: Floats
    masks: Masks
    texts: tuple[str | None, ...]


def tracked_frame(kept: KeptFrame, pixels: Pixels, groups: Sequence[Masklets], added: Collection[int]) -> TrackedFrame:
    """The objects of a frame that are tracked now; each pixel of a text's objects has one owner.

    Args:
        kept: The frame.
        pixels: uint8 [h, w, 3].
        groups: The objects of each text.
        added: The ids of objects that the user added.
    """
    width, height = kept.size
    objects = kept.objects
    outputs = [frame_output(objects, group.state.scores, kept.size) for group in groups]
    ids = np.concatenate([each.ids for each in outputs])
    order = np.argsort(ids)
    boxes = np.concatenate([each.boxes for each in outputs])[order]
    corners = boxes + np.concatenate([np.zeros_like(boxes[:, :2]), boxes[:, :2]], axis=1)
    texts = [group.text for group, each in zip(groups, outputs, strict=True) for _ in each.ids]
    return TrackedFrame(
        index=kept.index,
        pixels=pixels,
        ids=ids[order],
        scores=np.concatenate([each.scores for each in outputs])[order],
        boxes=corners * np.array([width, height, width, height], np.float32),
        masks=np.concatenate([each.masks for each in outputs])[order],
        texts=tuple(None if ids[row] in added else texts[row] for row in order),
    )

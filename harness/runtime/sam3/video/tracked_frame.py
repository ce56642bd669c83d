"""Makes a frame of the session's output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.runtime.sam3.video.kept import FrameResult
from harness.runtime.sam3.video.masklets import Masklets
from harness.runtime.sam3.video.outputs import frame_output

Floats = npt.NDArray[np.float32]
Masks = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class TrackedFrame:
    """A frame and its n visible objects, by rising id.

    Attributes:
        index: Number of the frame.
        pixels: uint8 [h, w, 3].
        ids: int64 [n].
        scores: fp32 [n], of the detections that the objects were found by; 1 for a clicked object.
        boxes: fp32 [n, 4], (x0, y0, x1, y1) in pixels.
        masks: bool [n, h, w]; no pixel belongs to several objects of one text.
        texts: The text that each object was found by; None for an object of a box or a click.
    """

    index: int
    pixels: Pixels
    ids: npt.NDArray[np.int64]
    scores: Floats
    boxes: Floats
    masks: Masks
    texts: tuple[str | None, ...]


def tracked_frame(
    frame_result: FrameResult, pixels: Pixels, groups: Sequence[Masklets], added: Collection[int]
) -> TrackedFrame:
    """Returns a frame with the objects that are tracked now; each pixel of a text's objects has one owner.

    Args:
        frame_result: The result of the frame.
        pixels: uint8 [h, w, 3].
        groups: The objects of each text.
        added: The ids of objects that the user added.
    """
    width, height = frame_result.size
    objects = frame_result.objects
    outputs = [frame_output(objects, group.state.scores, frame_result.size) for group in groups]
    ids = np.concatenate([output.ids for output in outputs])
    order = np.argsort(ids)
    boxes = np.concatenate([output.boxes for output in outputs])[order]
    corners = boxes + np.concatenate([np.zeros_like(boxes[:, :2]), boxes[:, :2]], axis=1)
    texts = [group.text for group, output in zip(groups, outputs, strict=True) for _ in output.ids]
    return TrackedFrame(
        index=frame_result.index,
        pixels=pixels,
        ids=ids[order],
        scores=np.concatenate([output.scores for output in outputs])[order],
        boxes=corners * np.array([width, height, width, height], np.float32),
        masks=np.concatenate([output.masks for output in outputs])[order],
        texts=tuple(None if ids[row] in added else texts[row] for row in order),
    )

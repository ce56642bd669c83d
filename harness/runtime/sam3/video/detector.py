"""Runs the detector on encoded frames and selects its detections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats
from harness.runtime.artifact import Tensors, call_with
from harness.runtime.sam3.images import MASK_SIZE
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.segmentation import SegmentationHead
from harness.runtime.sam3.video.masks import nms
from harness.runtime.sam3.video.rules import Rules

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import EncodedImage, ImageModel

_EPSILON = np.float32(1e-3)
"""`eps` of upstream's `inverse_sigmoid` (sam3/model/model_misc.py:20)."""


@dataclass(frozen=True, eq=False)
class Detections:
    """The selected detections of one frame, in the order of the detector's queries.

    Attributes:
        queries: int64 [D], the numbers of their queries.
        scores: fp32 [D], each above `Rules.detection_score`.
        masks: bool [D, H, W].
        logits: fp32 [D, H, W], of the masks.
        at_border: bool [D], whether the center of a detection's box is close to the border (`Rules.border`); None where
            no rule asks for it.
    """

    queries: npt.NDArray[np.int64]
    scores: Floats
    masks: npt.NDArray[np.bool_]
    logits: Floats
    at_border: npt.NDArray[np.bool_] | None = None


def video_scores(scores: Floats) -> Floats:
    """Returns the scores of a video from those of an image, sigmoid(logit) · sigmoid(presence), fp32 [Q].

    Upstream's video model turns the product into a logit and back, with both odds at least 0.001
    (sam3/model/sam3_image.py:352 and VB:366). A score is therefore at least 0.000999 and at most 0.999001, and one
    between 0.001 and 0.999 keeps its value. Upstream's logarithm and exponential round once more, by some 1e-7.
    """
    odds, against = np.maximum(scores, _EPSILON), np.maximum(1 - scores, _EPSILON)
    return np.asarray(odds / (odds + against), np.float32)


def candidates(scores: Floats, rules: Rules) -> npt.NDArray[np.int64]:
    """Returns the queries whose scores, fp32 [Q], are above `detection_score` (VB:372)."""
    return np.flatnonzero(scores > np.float32(rules.detection_score))


def select_detections(scores: Floats, logits: Floats, rules: Rules, boxes: Floats | None = None) -> Detections:
    """Selects the detections that count among Q queries on one frame.

    A score must be above `detection_score` (VB:372). Then masks are visited from the highest score to the lowest, and
    each remaining mask removes those with which its IoU is above `detection_iou` (sam3/model/sam3_image.py:818-831,
    sam3/perflib/nms.py:70). NumPy's argsort breaks a tie, as upstream's does.

    Args:
        scores: fp32 [Q], see `video_scores`.
        logits: fp32 [Q, H, W], masks; only those of `candidates` are read.
        rules: The thresholds.
        boxes: fp32 [Q, 4], (x0, y0, x1, y1) as shares of width and height; None where there is no rule about them.
    """
    queries = candidates(scores, rules)
    masks = logits[queries] > 0
    best = np.flatnonzero(
        nms(masks, scores[queries], rules.detection_score, rules.detection_iou, smaller=rules.multiplex)
    )
    chosen = queries[best]
    border = None if boxes is None or not rules.border else at_border(boxes[chosen], rules.border)
    return Detections(chosen, scores[chosen], masks[best], logits[chosen], border)


def at_border(boxes: Floats, border: float) -> npt.NDArray[np.bool_]:
    """Returns which boxes [D, 4] have their centers close to the border (`_suppress_detections_close_to_boundary`)."""
    centers = (boxes[:, :2] + boxes[:, 2:]) / 2
    inside = (centers > np.float32(border)) & (centers < np.float32(1 - border))
    return np.asarray(~inside.all(axis=1))


@dataclass(frozen=True, eq=False)
class EncodedFrame:
    """An encoded frame.

    Attributes:
        index: Its number.
        image: The detector's input.
        features: The tracker's input, from the entry point `interactive_features`.
    """

    index: int
    image: EncodedImage
    features: Tensors


class Detector:
    """Finds the objects of texts and a box, frame by frame.

    Attributes:
        prompts: The prompts; their boxes are on the frame `prompt_frame`.
        prompt_frame: The frame of the prompts.
        box_frames: For each frame, the frame whose boxes the detector has, see `update_box_frames`.
    """

    def __init__(self, model: ImageModel, prompts: Sequence[Prompt], prompt_frame: int, rules: Rules) -> None:
        """Stores the model, the prompts and the thresholds."""
        self.prompts, self.prompt_frame = tuple(prompts), prompt_frame
        self.box_frames: dict[int, int] = {}
        self._model, self._rules = model, rules
        self._latest: tuple[int, tuple[Detections | None, ...]] | None = None

    def detect(self, frame: EncodedFrame, length: int | None, reverse: bool) -> tuple[Detections | None, ...]:
        """Returns the detections of each prompt on a frame; None where the prompt does not run on this frame."""
        if self._latest is None or self._latest[0] != frame.index:
            end = length or frame.index + 2
            self.box_frames = update_box_frames(self.box_frames, frame.index, end, reverse)
            self._latest = frame.index, tuple(self._detect(prompt, frame) for prompt in self.prompts)
        return self._latest[1]

    def _detect(self, prompt: Prompt, frame: EncodedFrame) -> Detections | None:
        if prompt.text is None and frame.index != self.prompt_frame:
            return None
        image = frame.image
        boxed = self.box_frames[frame.index] == self.prompt_frame
        encoded = self._model.encode_prompt(prompt if boxed else Prompt(prompt.text), image.size)
        artifact = self._model.artifact
        (text,) = self._model.encode_texts([encoded.tokens])
        grounded = call_with(artifact, "ground", {**image.features, **text, **encoded.geometry})
        scores = video_scores(artifact.fetch(grounded["scores"])[0])
        logits = np.zeros((len(scores), MASK_SIZE, MASK_SIZE), np.float32)
        if len(queries := candidates(scores, self._rules)):
            logits[queries] = SegmentationHead(artifact, image.features, grounded).logits(queries)
        return select_detections(scores, logits, self._rules, artifact.fetch(grounded["boxes_xyxy"])[0])


def update_box_frames(previous: Mapping[int, int], frame: int, frames: int, reverse: bool) -> dict[int, int]:
    """Returns for each frame the frame whose boxes the detector has when the frame's detections are needed.

    Upstream's detector runs one frame ahead, with the boxes of the frame that is processed
    (sam3/model/sam3_image.py:728-788). Beside a text, the boxes of one frame thus decide also about the next frame,
    unless the detector ran on it before. This project follows it; a text applies to all frames, and without boxes there
    is no difference.

    Args:
        previous: The result for the frame before; empty after a new text or box.
        frame: The frame whose detections are needed.
        frames: The number of frames of the video.
        reverse: Whether frames are processed backwards.

    Returns:
        For this frame, the next one and other remembered frames, the frame whose boxes the detector has.
    """
    step = -1 if reverse else 1
    box_frames = {frame: frame, **previous}
    box_frames.pop(frame - step, None)
    if 0 <= frame + step < frames:
        box_frames.setdefault(frame + step, frame)
    return box_frames

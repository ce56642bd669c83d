"""Runs the detector on encoded frames."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.sam3.interactive import MASK_SIZE
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.video.detections import Detections, candidates, select_detections, video_scores
from harness.runtime.sam3.video.propagation import update_box_frames
from harness.runtime.sam3.video.rules import Rules

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import EncodedImage, ImageModel

Floats = npt.NDArray[np.float32]


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


@dataclass(frozen=True, eq=False)
class DetectorOutput:
    """The detector's output for one prompt on one frame.

    Attributes:
        detections: The selected detections.
        logits: fp32 [D, 288, 288], of their masks.
    """

    detections: Detections
    logits: Floats


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
        self._latest: tuple[int, tuple[DetectorOutput | None, ...]] | None = None

    def detect(self, frame: EncodedFrame, length: int | None, reverse: bool) -> tuple[DetectorOutput | None, ...]:
        """Returns the output for each prompt on a frame; None where the prompt does not run on this frame."""
        if self._latest is None or self._latest[0] != frame.index:
            end = length or frame.index + 2
            self.box_frames = update_box_frames(self.box_frames, frame.index, end, reverse)
            self._latest = frame.index, tuple(self._detect(prompt, frame) for prompt in self.prompts)
        return self._latest[1]

    def _detect(self, prompt: Prompt, frame: EncodedFrame) -> DetectorOutput | None:
        if prompt.text is None and frame.index != self.prompt_frame:
            return None
        image = frame.image
        boxed = self.box_frames[frame.index] == self.prompt_frame
        encoded = self._model.encode_prompt(prompt if boxed else Prompt(prompt.text), image.size)
        (text,) = self._model.encode_texts([encoded.tokens])
        grounded = self._model.ground(image.features, text, encoded)
        scores = video_scores(self._model.fetch(grounded["scores"])[0])
        logits = np.zeros((len(scores), MASK_SIZE, MASK_SIZE), np.float32)
        if len(queries := candidates(scores, self._rules)):
            logits[queries] = self._model.segmentation_head(image.features, grounded).logits(queries)
        detections = select_detections(scores, logits, self._rules)
        return DetectorOutput(detections, logits[detections.queries])

"""Frames that are encoded, and what the detector finds in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.sam3.interactive import MASK_SIZE
from harness.runtime.sam3.prompts import Prompt
from harness.runtime.sam3.video.detections import Detections, candidates, kept, video_scores
from harness.runtime.sam3.video.propagation import prompts_of_detections
from harness.runtime.sam3.video.rules import Rules

if TYPE_CHECKING:
    from harness.runtime.sam3.image_model import EncodedImage, ImageModel

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class EncodedFrame:
    """A frame that is encoded.

    Attributes:
        index: Its number.
        image: What the detector reads.
        features: What the tracker reads, from the entry point `interactive_features`.
    """

    index: int
    image: EncodedImage
    features: Tensors


@dataclass(frozen=True, eq=False)
class Found:
    """What the detector found: what counts of it, and the logits [D, 288, 288] of its masks."""

    detections: Detections
    logits: Floats


class Detector:
    """Finds what texts and a box mean, frame by frame.

    Attributes:
        prompts: What is asked, one after another; the boxes are those of the frame `prompted`.
        prompted: The frame of the prompts.
        boxes_of: Of which frame the detector has the boxes, see `prompts_of_detections`.
    """

    def __init__(self, model: ImageModel, prompts: Sequence[Prompt], prompted: int, rules: Rules) -> None:
        """Takes what is asked."""
        self.prompts, self.prompted = tuple(prompts), prompted
        self.boxes_of: dict[int, int] = {}
        self._model, self._rules = model, rules
        self._latest: tuple[int, tuple[Found | None, ...]] | None = None

    def found(self, frame: EncodedFrame, length: int | None, reverse: bool) -> tuple[Found | None, ...]:
        """What each prompt means in a frame; None where the detector is not asked."""
        if self._latest is None or self._latest[0] != frame.index:
            end = length or frame.index + 2
            self.boxes_of = prompts_of_detections(self.boxes_of, frame.index, end, reverse)
            self._latest = frame.index, tuple(self._found(prompt, frame) for prompt in self.prompts)
        return self._latest[1]

    def _found(self, prompt: Prompt, frame: EncodedFrame) -> Found | None:
        if prompt.text is None and frame.index != self.prompted:
            return None
        image = frame.image
        boxed = self.boxes_of[frame.index] == self.prompted
        encoded = self._model.encode_prompt(prompt if boxed else Prompt(prompt.text), image.size)
        (text,) = self._model.encode_texts([encoded.tokens])
        grounded = self._model.ground(image.features, text, encoded)
        scores = video_scores(self._model.fetch(grounded["scores"])[0])
        logits = np.zeros((len(scores), MASK_SIZE, MASK_SIZE), np.float32)
        if len(possible := candidates(scores, self._rules)):
            logits[possible] = self._model.segmentation_head(image.features, grounded).logits(possible)
        detections = kept(scores, logits, self._rules)
        return Found(detections, logits[detections.queries])

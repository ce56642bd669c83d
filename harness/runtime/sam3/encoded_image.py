"""Answers prompts on an encoded image, as upstream's `Sam3Processor` and `SAM3InteractiveImagePredictor` do."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.errors import ModelError
from harness.runtime.sam3.interactive import (
    LARGEST_LOGIT,
    Box,
    EncodedObjectPrompt,
    ObjectLabels,
    ObjectPrompt,
    Prediction,
    fill_holes,
    select_masks,
)
from harness.runtime.sam3.prompts import Coordinates, EncodedPrompt, Labels, Prompt
from harness.runtime.sam3.segmentation import Found, Outputs, Queries, SegmentationHead

if TYPE_CHECKING:
    from harness.runtime.sam3.model import Sam3

Floats = npt.NDArray[np.float32]

THRESHOLD = 0.5
"""A query is an object if its score is above this: `confidence_threshold` of `Sam3Processor`."""

_RESIZE_BATCH = 8
"""Masks that are resized in one call: each has a byte for every pixel of the photograph."""

DECISIVE = ("logits", "boxes", "presence", "scores", "boxes_xyxy")
"""The outputs of `ground` that decide which objects are found."""


class EncodedImage:
    """An encoded image; several threads may use it.

    Attributes:
        pixels: uint8 [h, w, 3], RGB.
        features: TVM's tensors from the entry point `encode_image`, by name.
    """

    def __init__(self, model: Sam3, pixels: npt.NDArray[np.uint8], features: Tensors) -> None:
        self.pixels = pixels
        self.features = features
        self._model = model
        self._interactive: Tensors | None = None
        self._lock = threading.Lock()

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        height, width = self.pixels.shape[:2]
        return width, height

    def is_of(self, model: Sam3) -> bool:
        """Returns whether a model has encoded this image."""
        return self._model is model

    def segment(
        self,
        text: str | None = None,
        boxes: Coordinates = None,
        box_labels: Labels = None,
        points: Coordinates = None,
        point_labels: Labels = None,
        threshold: float = THRESHOLD,
        exemplar: EncodedImage | None = None,
    ) -> Found:
        """Finds all objects of a prompt.

        Args:
            text: A noun phrase; without a text, boxes and points are the prompt.
            boxes: (x0, y0, x1, y1) each, in pixels.
            box_labels: True for a positive box, False for a negative one; all True by default.
            points: (x, y) each, in pixels.
            point_labels: Labels of the points, like `box_labels`.
            threshold: Objects score above this.
            exemplar: See `segment_each`.

        Raises:
            ModelError: The prompt is empty, or invalid for this image.
        """
        prompt = Prompt(text, boxes, box_labels, points, point_labels)
        (result,) = self.segment_each([prompt], threshold, exemplar=exemplar)
        return result

    def segment_batch(self, prompts: Sequence[Prompt], threshold: float = THRESHOLD) -> list[Found]:
        """Finds the objects of each prompt; takes the arguments and raises the errors of `segment_each`."""
        return list(self.segment_each(prompts, threshold))

    def segment_each(
        self,
        prompts: Sequence[Prompt],
        threshold: float = THRESHOLD,
        *,
        has_masks: bool = True,
        exemplar: EncodedImage | None = None,
    ) -> Iterator[Found]:
        """Yields the objects of each prompt, one prompt after another, so that not all results are in memory at once.

        Texts are encoded together. All prompts are checked before the model runs.

        Args:
            prompts: Any number of prompts.
            threshold: Objects score above this.
            has_masks: Whether masks are predicted at once; otherwise they are predicted at their first use.
            exemplar: Another image that the boxes and points are on, encoded by the same model. SAM 3 was trained with
                boxes on the image itself; how well it finds what another image shows is not known here.

        Raises:
            ModelError: A prompt is empty or invalid for this image.
        """
        if not 0 <= threshold <= 1:
            raise ModelError(f"The threshold {threshold} is no score; give a number from 0 to 1.")
        encoded = [self._model.encode_prompt(prompt, self.size, exemplar) for prompt in prompts]
        return self._segment_encoded(encoded, float(threshold), has_masks)

    def _segment_encoded(self, prompts: Sequence[EncodedPrompt], threshold: float, has_masks: bool) -> Iterator[Found]:
        texts = self._model.encode_texts([prompt.tokens for prompt in prompts])
        for prompt, text in zip(prompts, texts, strict=True):
            result = self._ground_prompt(prompt, text, threshold)
            if has_masks:
                _ = result.masks
            yield result

    def predict(
        self,
        points: Coordinates = None,
        labels: ObjectLabels = None,
        box: Box = None,
        mask: Floats | None = None,
        multimask: bool = True,
    ) -> Prediction:
        """Predicts masks of one object.

        Args:
            points: (x, y) each, in pixels.
            labels: For each point, whether it is on the object (1) or not (0); all 1 by default.
            box: (x0, y0, x1, y1) around the object, in pixels.
            mask: Logits fp32 [288, 288], or [1, 288, 288] as upstream's, of an earlier prediction, to refine.
            multimask: Whether to return three masks, which is better for an ambiguous prompt such as one click.

        Raises:
            ModelError: The prompt is empty or invalid for this image, or the model was compiled without clicks.
        """
        (prediction,) = self.predict_batch([ObjectPrompt(points, labels, box, mask)], multimask)
        return prediction

    def predict_batch(self, prompts: Sequence[ObjectPrompt], multimask: bool = True) -> list[Prediction]:
        """Predicts masks of several objects; all prompts are checked before the model runs.

        Args:
            prompts: One for each object.
            multimask: See `predict`.

        Raises:
            ModelError: See `predict`.
        """
        encoded = [self._model.encode_object_prompt(prompt, self.size) for prompt in prompts]
        with self._lock:
            if self._interactive is None and prompts:
                self._interactive = self._model.interactive_features(self.features)
        return [self._predict_encoded(prompt, multimask) for prompt in encoded]

    def _predict_encoded(self, prompt: EncodedObjectPrompt, multimask: bool) -> Prediction:
        """Predicts masks for an encoded prompt; holes are filled in the masks, and not in the logits."""
        tensors = self._model.call_with("predict_masks", {**(self._interactive or {}), **prompt.inputs})
        outputs = {name: self._model.artifact.fetch(tensor) for name, tensor in tensors.items()}
        logits, iou = select_masks(outputs["masks"][0], outputs["iou"][0], multimask)
        return Prediction(
            masks=self._model.resize_masks(
                fill_holes(logits)[None], np.arange(len(logits), dtype=np.int64), self.pixels
            ),
            iou=iou.copy(),
            logits=np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT),
            object_score=float(outputs["object_score"][0, 0]),
            notes=prompt.notes,
        )

    def _ground_prompt(self, prompt: EncodedPrompt, text: Tensors, threshold: float) -> Found:
        """Finds the objects of an encoded prompt; their masks are predicted at the first use."""
        tensors = self._model.call_with("ground", {**self.features, **text, **prompt.geometry})
        head = SegmentationHead(self._model, self.features, tensors)
        outputs = Outputs(**{name: self._model.artifact.fetch(tensors[name]) for name in DECISIVE}, _head=head)
        queries = np.flatnonzero(outputs.scores[0] > threshold).astype(np.int64)
        return Found(
            predict=partial(_resized_masks, self._model, head, queries, self.pixels),
            boxes=outputs.boxes_xyxy[0, queries] * np.array([*self.size, *self.size], np.float32),
            scores=outputs.scores[0, queries],
            queries=queries,
            outputs=outputs,
            size=self.size,
            notes=prompt.notes,
        )


def _resized_masks(
    model: Sam3, head: SegmentationHead, queries: Queries, pixels: npt.NDArray[np.uint8]
) -> Iterator[npt.NDArray[np.bool_]]:
    """Yields the masks of the queries at the image's size, in batches bool [n, h, w]."""
    for logits, rows in head.masks(queries):
        for start in range(0, len(rows), _RESIZE_BATCH):
            yield model.resize_masks(logits, rows[start : start + _RESIZE_BATCH], pixels)

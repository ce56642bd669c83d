"""Answers prompts on images with a compiled model: an image is encoded once and then takes any number of prompts.

The meaning is that of upstream's `sam3.model.sam3_image_processor.Sam3Processor`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats
from harness.runtime.artifact import LoadedModel, Tensors, call_with
from harness.runtime.errors import ModelError
from harness.runtime.manifest import ArtifactError, Manifest
from harness.runtime.sam3.description import read_sam3_description
from harness.runtime.sam3.images import to_pixels
from harness.runtime.sam3.interactive import (
    LARGEST_LOGIT,
    Box,
    EncodedObjectPrompt,
    ObjectLabels,
    ObjectPrompt,
    Prediction,
    encode_object_prompt,
    fill_holes,
    select_masks,
)
from harness.runtime.sam3.prompts import Coordinates, EncodedPrompt, Labels, Prompt, check_prompt, encode_prompt
from harness.runtime.sam3.segmentation import Found, Outputs, Queries, SegmentationHead
from harness.runtime.sam3.tokenizer import Tokenizer, pack_texts

if TYPE_CHECKING:
    from PIL import Image

THRESHOLD = 0.5
"""A query is an object if its score is above this: `confidence_threshold` of `Sam3Processor`."""

REMEMBERED_TEXTS = 64
"""Encoded texts in a model's cache, the ones used last; each takes 32 KiB."""

ENTRIES = ("preprocess", "encode_image", "resize_masks")
GROUNDING = ("encode_text", "ground")
"""The entry points that find all objects of a prompt of text, boxes and points."""
INTERACTIVE = ("interactive_features", "predict_masks")
"""The entry points that predict masks of one object from clicks, a box or a mask."""


_RESIZE_BATCH = 8
"""Masks that are resized in one call: each has a byte for every pixel of the photograph."""

DECISIVE = ("logits", "boxes", "presence", "scores", "boxes_xyxy")
"""The outputs of `ground` that decide which objects are found."""


class ImageModel:
    """The entry points of a compiled model for images. Several threads may use it.

    Attributes:
        manifest: The artifact's manifest.
        description: SAM 3's part of it.
        artifact: The compiled model, whose entry points can be called one by one.
    """

    def __init__(self, artifact: LoadedModel) -> None:
        """Checks the entry points of a loaded artifact and reads its vocabulary.

        Raises:
            ArtifactError: The artifact has another model, or lacks an entry point or its vocabulary.
        """
        self.description = read_sam3_description(artifact.folder, artifact.manifest)
        entries = artifact.manifest.entries
        task = GROUNDING if "interactive_features" not in entries else INTERACTIVE
        missing = [name for name in (*ENTRIES, *task) if name not in entries]
        if missing:
            raise ArtifactError(f"{artifact.folder} has no entry point {missing[0]}: compile the model again")
        self.manifest: Manifest = artifact.manifest
        self.artifact = artifact
        self._tokenizer = Tokenizer.read(artifact.folder / self.description.vocabulary)
        self._texts: OrderedDict[bytes, Tensors] = OrderedDict()
        self._lock = threading.Lock()

    def set_image(self, image: str | Path | Image.Image | npt.NDArray[np.uint8]) -> EncodedImage:
        """Encodes an image, which then takes any number of prompts.

        Args:
            image: A file, which is turned upright by its EXIF data; an image of Pillow, which is not turned; or pixels,
                uint8 [h, w, 3], RGB.

        Raises:
            ModelError: The image is none of these, or a file that cannot be read.
        """
        pixels = to_pixels(image)
        (prepared,) = self.artifact.call("preprocess", image=pixels).values()
        with self.artifact.reading_once("encode_image"):
            features = self.artifact.call("encode_image", pixels=prepared)
        return EncodedImage(self, pixels, features)

    def encode_texts(self, texts: Sequence[npt.NDArray[np.int64]]) -> list[Tensors]:
        """Returns the model's tensors for tokenized texts, int64 [1, 32] each; the last texts are cached."""
        keys = [tokens.tobytes() for tokens in texts]
        with self._lock:
            for key in keys:
                if key in self._texts:
                    self._texts.move_to_end(key)
            features = {key: self._texts[key] for key in keys if key in self._texts}
        new = {key: tokens for key, tokens in zip(keys, texts, strict=True) if key not in features}
        if new:
            with self.artifact.reading_once("encode_text"):
                encoded = dict(zip(new, self._encode_texts(list(new.values())), strict=True))
            features |= encoded
            with self._lock:
                self._texts |= encoded
                while len(self._texts) > REMEMBERED_TEXTS:
                    self._texts.popitem(last=False)
        return [features[key] for key in keys]

    def _encode_texts(self, texts: Sequence[npt.NDArray[np.int64]]) -> list[Tensors]:
        """Returns the outputs of the entry point `encode_text` for each of the texts."""
        if all(spec.name != "starts" for spec in self.manifest.entries["encode_text"].inputs):  # an older folder
            return [self.artifact.call("encode_text", tokens=tokens) for tokens in texts]
        encoded: list[Tensors] = []
        for batch in pack_texts(texts):
            tensors = self.artifact.call("encode_text", **batch.inputs)
            is_single = len(batch.texts) == 1
            encoded += [tensors] if is_single else batch.split(self.artifact.fetch(tensors["text_features"]))
        return encoded

    def check_prompt(self, prompt: Prompt) -> None:
        """Checks everything of a prompt that does not depend on the image.

        Raises:
            ModelError: The prompt is empty, or invalid for any image.
        """
        check_prompt(prompt, self.description.capacity, self._tokenizer)

    def encode_prompt(
        self, prompt: Prompt, size: tuple[int, int], exemplar: EncodedImage | None = None
    ) -> EncodedPrompt:
        """Encodes a prompt for an image of this width and height.

        Of an exemplar the entry point `ground` reads the feature map that its geometry encoder looks at: the tokens of
        boxes and points are pooled from it and attend to it, and then join the grounding of the image.

        Raises:
            ModelError: The prompt is empty, or invalid for this image, these weights or this folder.
        """
        if any(name not in self.manifest.entries for name in GROUNDING):
            raise ModelError("This model was compiled for clicks alone; compile it again without `--no-grounding`.")
        if prompt.points is not None and len(prompt.points) and not self.description.point_prompts:
            raise ModelError(
                f"The weights ({self.manifest.weights}) are in the layout of Transformers, which has none for points; "
                "ask with a text or boxes, or compile with the published sam3.pt."
            )
        capacity = self.description.capacity
        if exemplar is None:
            return encode_prompt(prompt, size, capacity, self._tokenizer)
        if not exemplar.is_of(self):
            raise ModelError("The exemplar was encoded by another model; encode it with this one.")
        if all(spec.name != "attended" for spec in self.manifest.entries["ground"].inputs):  # an older folder
            raise ModelError("This model was compiled before exemplars were known; compile it again.")
        encoded = encode_prompt(prompt, exemplar.size, capacity, self._tokenizer)
        if encoded.geometry["boxes_mask"].all() and encoded.geometry["points_mask"].all():
            raise ModelError("Nothing is shown on the exemplar; give a box or a point on it, or leave it out.")
        return replace(encoded, geometry={**encoded.geometry, "fpn_2": exemplar.features["fpn_2"]})

    def encode_object_prompt(self, prompt: ObjectPrompt, size: tuple[int, int]) -> EncodedObjectPrompt:
        """Encodes a prompt for one object in an image of this width and height.

        Raises:
            ModelError: The prompt is empty or invalid for this image, or the model was compiled without clicks.
        """
        if any(name not in self.manifest.entries for name in INTERACTIVE):
            raise ModelError(
                "This model was compiled without clicks; compile it again with `sam3-tvm compile --clicks 16`."
            )
        return encode_object_prompt(prompt, size, self.description.capacity)

    def interactive_features(self, features: Tensors) -> Tensors:
        """Computes the features that `predict_masks` reads from the features of an image."""
        with self.artifact.reading_once("interactive_features"):
            return self.artifact.call("interactive_features", trunk=features["trunk"])

    def resize_masks(
        self, masks: Any, indices: npt.NDArray[np.int64], photograph: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.bool_]:
        """Resizes masks to the size of an image.

        Args:
            masks: The model's logits [1, n, 288, 288].
            indices: int64 [k], the masks to resize.
            photograph: The image's pixels, uint8 [h, w, 3].

        Returns:
            bool [k, h, w].
        """
        if not len(indices):
            return np.zeros((0, *photograph.shape[:2]), bool)
        (resized,) = self.artifact.call("resize_masks", masks=masks, kept=indices, like=photograph).values()
        values: npt.NDArray[np.bool_] = self.artifact.fetch(resized)
        return values


class EncodedImage:
    """An encoded image; several threads may use it.

    Attributes:
        pixels: uint8 [h, w, 3], RGB.
        features: TVM's tensors from the entry point `encode_image`, by name.
    """

    def __init__(self, model: ImageModel, pixels: npt.NDArray[np.uint8], features: Tensors) -> None:
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

    def is_of(self, model: ImageModel) -> bool:
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
        inputs = {**(self._interactive or {}), **prompt.inputs}
        tensors = call_with(self._model.artifact, "predict_masks", inputs)
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
        artifact = self._model.artifact
        tensors = call_with(artifact, "ground", {**self.features, **text, **prompt.geometry})
        head = SegmentationHead(artifact, self.features, tensors)
        outputs = Outputs(**{name: artifact.fetch(tensors[name]) for name in DECISIVE}, _head=head)
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
    model: ImageModel, head: SegmentationHead, queries: Queries, pixels: npt.NDArray[np.uint8]
) -> Iterator[npt.NDArray[np.bool_]]:
    """Yields the masks of the queries at the image's size, in batches bool [n, h, w]."""
    for logits, rows in head.masks(queries):
        for start in range(0, len(rows), _RESIZE_BATCH):
            yield model.resize_masks(logits, rows[start : start + _RESIZE_BATCH], pixels)

"""The compiled model of images: an image is encoded once and then asked any number of prompts.

The meaning of everything is that of upstream's `sam3.model.sam3_image_processor.Sam3Processor`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import LoadedModel, Tensors
from harness.runtime.errors import Sam3Error
from harness.runtime.manifest import ArtifactError, Manifest
from harness.runtime.sam3.found import Found, Outputs, Queries, SegmentationHead, SomeMasks
from harness.runtime.sam3.images import to_pixels
from harness.runtime.sam3.interactive import (
    LARGEST_LOGIT,
    Box,
    EncodedObjectPrompt,
    ObjectLabels,
    ObjectPrompt,
    Prediction,
    encode_object_prompt,
    selected,
    without_holes,
)
from harness.runtime.sam3.prompts import Coordinates, EncodedPrompt, Labels, Prompt, check_prompt, encode_prompt
from harness.runtime.sam3.texts import packed
from harness.runtime.sam3.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image

Floats = npt.NDArray[np.float32]

THRESHOLD = 0.5
"""A query is kept if its score is above it: `confidence_threshold` of `Sam3Processor`."""

REMEMBERED_TEXTS = 64
"""Encoded texts that a model keeps, the ones used last; each takes 32 KiB."""

ENTRIES = ("preprocess", "encode_image", "resize_masks")
GROUNDING = ("encode_text", "ground")
"""The entry points that find everything that a text, boxes and points mean."""
EMBED_PIXELS, MASK_PREDICTOR = "embed_pixels", "mask_predictor"
"""The entry points that make the masks of some of the queries."""
SEGMENTATION_HEAD = "segmentation_head"
"""The entry point that made the masks of all queries in older folders; in still older ones `ground` did."""
INTERACTIVE = ("interactive_features", "predict_masks")
"""The entry points that predict masks of one object from clicks, a box or a mask."""


_AT_ONCE = 8
"""Masks that are resized at once: each has a byte for every pixel of the photograph."""

DECISIVE = ("logits", "boxes", "presence", "scores", "boxes_xyxy")
"""The outputs of `ground` that say what was found."""


class ImageModel:
    """The entry points of a compiled model that answer questions about images. Several threads may use it.

    Attributes:
        manifest: What the artifact says about itself.
    """

    def __init__(self, artifact: LoadedModel) -> None:
        """Take an artifact that is loaded.

        Raises:
            ArtifactError: It lacks an entry point or its vocabulary.
        """
        entries = artifact.manifest.entries
        half = GROUNDING if "interactive_features" not in entries else INTERACTIVE
        missing = [name for name in (*ENTRIES, *half) if name not in entries]
        if missing:
            raise ArtifactError(f"{artifact.folder} has no entry point {missing[0]}: compile the model again")
        self.manifest: Manifest = artifact.manifest
        self._artifact = artifact
        self._tokenizer = Tokenizer.read(artifact.folder / artifact.manifest.vocabulary)
        self._texts: OrderedDict[bytes, Tensors] = OrderedDict()
        self._lock = threading.Lock()

    def set_image(self, image: str | Path | Image.Image | npt.NDArray[np.uint8]) -> EncodedImage:
        """Encodes an image; the result is asked as often as one likes.

        Args:
            image: A file, which is turned upright as its EXIF data say; an image of Pillow, taken as it is; or its
                pixels, uint8 [h, w, 3], RGB.

        Raises:
            Sam3Error: It is none of these, or a file that cannot be read.
        """
        pixels = to_pixels(image)
        (prepared,) = self._artifact.call("preprocess", image=pixels).values()
        with self._artifact.reading_once("encode_image"):
            features = self._artifact.call("encode_image", pixels=prepared)
        return EncodedImage(self, pixels, features)

    @property
    def artifact(self) -> LoadedModel:
        """The compiled model, whose entry points can be called one by one."""
        return self._artifact

    def encode_texts(self, texts: Sequence[npt.NDArray[np.int64]]) -> list[Tensors]:
        """The model's tensors for tokenized texts, int64 [1, 32] each; those of the last texts are remembered."""
        keys = [tokens.tobytes() for tokens in texts]
        with self._lock:
            for key in keys:
                if key in self._texts:
                    self._texts.move_to_end(key)
            known = {key: self._texts[key] for key in keys if key in self._texts}
        new = {key: tokens for key, tokens in zip(keys, texts, strict=True) if key not in known}
        if new:
            with self._artifact.reading_once("encode_text"):
                encoded = dict(zip(new, self._encoded(list(new.values())), strict=True))
            known |= encoded
            with self._lock:
                self._texts |= encoded
                while len(self._texts) > REMEMBERED_TEXTS:
                    self._texts.popitem(last=False)
        return [known[key] for key in keys]

    def _encoded(self, texts: Sequence[npt.NDArray[np.int64]]) -> list[Tensors]:
        """The outputs of the entry point `encode_text` for each of the texts, several of which it takes at once."""
        if all(spec.name != "starts" for spec in self.manifest.entries["encode_text"].inputs):  # an older folder
            return [self._artifact.call("encode_text", tokens=tokens) for tokens in texts]
        encoded: list[Tensors] = []
        for together in packed(texts):
            tensors = self._artifact.call("encode_text", **together.inputs)
            alone = len(together.texts) == 1
            encoded += [tensors] if alone else together.split(self.fetch(tensors["text_features"]))
        return encoded

    def check_prompt(self, prompt: Prompt) -> None:
        """Checks everything of a prompt that does not depend on the image.

        Raises:
            Sam3Error: Nothing is asked, or the prompt makes no sense for any image.
        """
        check_prompt(prompt, self.manifest.capacity, self._tokenizer)

    def encode_prompt(self, prompt: Prompt, size: tuple[int, int]) -> EncodedPrompt:
        """A prompt for an image of this width and height, as the model takes it.

        Raises:
            Sam3Error: Nothing is asked, or the prompt makes no sense for this image, these weights or this folder.
        """
        if any(name not in self.manifest.entries for name in GROUNDING):
            raise Sam3Error("This model was compiled for clicks alone; compile it again without `--no-grounding`.")
        if prompt.points is not None and len(prompt.points) and not self.manifest.point_prompts:
            raise Sam3Error(
                f"The weights ({self.manifest.weights}) are in the layout of Transformers, which has none for points; "
                "ask with a text or boxes, or compile with the published sam3.pt."
            )
        return encode_prompt(prompt, size, self.manifest.capacity, self._tokenizer)

    def encode_object_prompt(self, prompt: ObjectPrompt, size: tuple[int, int]) -> EncodedObjectPrompt:
        """A prompt for one object in an image of this width and height, as the model takes it.

        Raises:
            Sam3Error: Nothing is asked, the prompt makes no sense for this image, or the model was compiled without
                clicks.
        """
        if any(name not in self.manifest.entries for name in INTERACTIVE):
            raise Sam3Error(
                "This model was compiled without clicks; compile it again with `sam3-tvm compile --clicks 16`."
            )
        return encode_object_prompt(prompt, size, self.manifest.capacity)

    def interactive_features(self, features: Tensors) -> Tensors:
        """What `predict_masks` reads of an image, from its features."""
        with self._artifact.reading_once("interactive_features"):
            return self._artifact.call("interactive_features", trunk=features["trunk"])

    def predict_masks(self, features: Tensors, prompt: EncodedObjectPrompt) -> Tensors:
        """The outputs of the entry point `predict_masks`, by name."""
        return self._call_with("predict_masks", {**features, **prompt.inputs})

    def ground(self, features: Tensors, text: Tensors, prompt: EncodedPrompt) -> Tensors:
        """The outputs of the entry point `ground`, by name.

        Args:
            features: An image's, from the entry point `encode_image`.
            text: The prompt's, from `encode_texts`.
            prompt: What is asked.
        """
        given = {**features, **text, **prompt.geometry}
        return self._call_with("ground", given)

    def segmentation_head(self, features: Tensors, grounded: Tensors) -> SegmentationHead:
        """Masks and semantic map of what was found, not computed yet.

        Args:
            features: An image's, from the entry point `encode_image`.
            grounded: What `ground` returned for it.
        """
        embed = partial(self._embed_pixels, features, grounded)
        return SegmentationHead(embed, partial(self._predict_masks, grounded.get("hs")), self.fetch)

    def _embed_pixels(self, features: Tensors, grounded: Tensors) -> Tensors:
        """What masks are predicted from, and the semantic map; of older folders the masks of all queries instead."""
        entry = next((name for name in (EMBED_PIXELS, SEGMENTATION_HEAD) if name in self.manifest.entries), None)
        return self._call_with(entry, {**features, **grounded}) if entry else grounded

    def _predict_masks(self, decoded: Any, embedded: Tensors, queries: Queries) -> Iterator[SomeMasks]:
        """Yields the masks of the queries, as many at once as the entry point takes.

        Args:
            decoded: The tensor `hs` of all queries; None in the oldest folders, which do not read it.
            embedded: What `_embed_pixels` returned.
            queries: int64 [k].
        """
        if MASK_PREDICTOR not in self.manifest.entries:
            yield SomeMasks(embedded["masks"], queries)
            return
        hs = self.fetch(decoded)
        (shape,) = (spec.shape for spec in self.manifest.entries[MASK_PREDICTOR].inputs if spec.name == "hs")
        together = int(shape[2])
        for start in range(0, len(queries), together):
            some = queries[start : start + together]
            chosen = np.zeros((1, 1, together, hs.shape[3]), np.float32)
            chosen[:, :, : len(some)] = hs[:, :, some]
            masks = self._call_with(MASK_PREDICTOR, {**embedded, "hs": chosen})
            yield SomeMasks(masks["masks"], np.arange(len(some)))

    def _call_with(self, entry: str, given: Tensors) -> Tensors:
        """Runs an entry point with those of the given tensors that it reads."""
        inputs = self.manifest.entries[entry].inputs
        return self._artifact.call(entry, **{spec.name: given[spec.name] for spec in inputs})

    def resize_masks(
        self, masks: Any, kept: npt.NDArray[np.int64], like: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.bool_]:
        """The masks bool [k, h, w] of the kept ones; `masks` are logits, `like` the image's pixels."""
        if not len(kept):
            return np.zeros((0, *like.shape[:2]), bool)
        (at_size,) = self._artifact.call("resize_masks", masks=masks, kept=kept, like=like).values()
        resized_masks: npt.NDArray[np.bool_] = self.fetch(at_size)
        return resized_masks

    def fetch(self, tensor: Any) -> npt.NDArray[Any]:
        """The values of one of the model's tensors."""
        return self._artifact.fetch(tensor)


class EncodedImage:
    """An image that a model has encoded; several threads may ask it.

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

    def segment(
        self,
        text: str | None = None,
        boxes: Coordinates = None,
        box_labels: Labels = None,
        points: Coordinates = None,
        point_labels: Labels = None,
        threshold: float = THRESHOLD,
    ) -> Found:
        """Finds all that is asked for.

        Args:
            text: A noun phrase; without one, boxes and points say what is meant.
            boxes: (x0, y0, x1, y1) each, in pixels.
            box_labels: True for a box that shows what is meant, False for one that does not; all True by default.
            points: (x, y) each, in pixels.
            point_labels: As `box_labels`.
            threshold: What scores above it is kept.

        Raises:
            Sam3Error: Nothing is asked, or the prompt makes no sense for this image.
        """
        (found,) = self.segment_batch([Prompt(text, boxes, box_labels, points, point_labels)], threshold)
        return found

    def segment_batch(self, prompts: Sequence[Prompt], threshold: float = THRESHOLD) -> list[Found]:
        """Finds what each prompt asks for; arguments and errors are those of `segment_each`."""
        return list(self.segment_each(prompts, threshold))

    def segment_each(
        self, prompts: Sequence[Prompt], threshold: float = THRESHOLD, *, has_masks: bool = True
    ) -> Iterator[Found]:
        """Finds what each prompt asks for, one after the other, so that not all results are in memory at once.

        Their texts are encoded together. Nothing is run before all prompts have been checked.

        Args:
            prompts: Any number of prompts.
            threshold: What scores above it is kept.
            has_masks: Whether masks are predicted at once; otherwise when they are asked for.

        Raises:
            Sam3Error: A prompt asks nothing or makes no sense for this image.
        """
        if not 0 <= threshold <= 1:
            raise Sam3Error(f"The threshold {threshold} is no score; give a number from 0 to 1.")
        encoded = [self._model.encode_prompt(prompt, self.size) for prompt in prompts]
        return self._each(encoded, float(threshold), has_masks)

    def _each(self, prompts: Sequence[EncodedPrompt], threshold: float, has_masks: bool) -> Iterator[Found]:
        texts = self._model.encode_texts([prompt.tokens for prompt in prompts])
        for prompt, text in zip(prompts, texts, strict=True):
            found = self._found(prompt, text, threshold)
            if has_masks:
                _ = found.masks
            yield found

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
            multimask: Whether to give three masks, which is better where the prompt is ambiguous, as one click is.

        Raises:
            Sam3Error: Nothing is asked, the prompt makes no sense for this image, or the model knows no clicks.
        """
        (prediction,) = self.predict_batch([ObjectPrompt(points, labels, box, mask)], multimask)
        return prediction

    def predict_batch(self, prompts: Sequence[ObjectPrompt], multimask: bool = True) -> list[Prediction]:
        """Predicts masks of several objects; nothing is run before all prompts have been checked.

        Args:
            prompts: One for each object.
            multimask: As in `predict`.

        Raises:
            Sam3Error: As in `predict`.
        """
        encoded = [self._model.encode_object_prompt(prompt, self.size) for prompt in prompts]
        with self._lock:
            if self._interactive is None and prompts:
                self._interactive = self._model.interactive_features(self.features)
        return [self._predicted(prompt, multimask) for prompt in encoded]

    def _predicted(self, prompt: EncodedObjectPrompt, multimask: bool) -> Prediction:
        tensors = self._model.predict_masks(self._interactive or {}, prompt)
        outputs = {name: self._model.fetch(tensor) for name, tensor in tensors.items()}
        logits, iou = selected(outputs["masks"][0], outputs["iou"][0], multimask)
        return Prediction(
            masks=self._model.resize_masks(
                without_holes(logits)[None], np.arange(len(logits), dtype=np.int64), self.pixels
            ),
            iou=iou.copy(),
            logits=np.clip(logits, -LARGEST_LOGIT, LARGEST_LOGIT),
            object_score=float(outputs["object_score"][0, 0]),
            notes=prompt.notes,
        )

    def _found(self, prompt: EncodedPrompt, text: Tensors, threshold: float) -> Found:
        tensors = self._model.ground(self.features, text, prompt)
        head = self._model.segmentation_head(self.features, tensors)
        outputs = Outputs(**{name: self._model.fetch(tensors[name]) for name in DECISIVE}, _head=head)
        queries = np.flatnonzero(outputs.scores[0] > threshold).astype(np.int64)
        return Found(
            predict=partial(_masks, self._model, head, queries, self.pixels),
            boxes=outputs.boxes_xyxy[0, queries] * np.array([*self.size, *self.size], np.float32),
            scores=outputs.scores[0, queries],
            queries=queries,
            outputs=outputs,
            size=self.size,
            notes=prompt.notes,
        )


def _masks(
    model: ImageModel, head: SegmentationHead, queries: Queries, pixels: npt.NDArray[np.uint8]
) -> Iterator[npt.NDArray[np.bool_]]:
    """Yields the masks of the queries at the image's size, bool [n, h, w], few at once."""
    for some in head.masks(queries):
        for start in range(0, len(some.places), _AT_ONCE):
            yield model.resize_masks(some.logits, some.places[start : start + _AT_ONCE], pixels)

"""SAM 3, compiled: an image is encoded once and then asked any number of prompts.

The meaning of everything is that of upstream's `sam3.model.sam3_image_processor.Sam3Processor`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Artifact, Loaded, Tensors
from harness.runtime.errors import Sam3Error
from harness.runtime.manifest import ArtifactError, Manifest
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
from harness.runtime.sam3.resizing import resized
from harness.runtime.sam3.texts import packed
from harness.runtime.sam3.tokenizer import Tokenizer

if TYPE_CHECKING:
    from PIL import Image

    from harness.runtime.sam3.video.session import Session

Floats = npt.NDArray[np.float32]

THRESHOLD = 0.5
"""A query is kept if its score is above it: `confidence_threshold` of `Sam3Processor`."""

REMEMBERED_TEXTS = 64
"""Encoded texts that a model keeps, the ones used last; each takes 32 KiB."""

ENTRIES = ("preprocess", "encode_image", "resize_masks")
GROUNDING = ("encode_text", "ground")
"""The entry points that find everything that a text, boxes and points mean."""
SEGMENTATION_HEAD = "segmentation_head"
"""The entry point that makes the masks of what was found; in older folders `ground` makes them too."""
INTERACTIVE = ("interactive_features", "predict_masks")
"""The entry points that predict masks of one object from clicks, a box or a mask."""


DECISIVE = ("logits", "boxes", "presence", "scores", "boxes_xyxy")
"""The outputs of `ground` that say what was found."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the model computes for one prompt, before anything is decided: Q = 200 queries, all fp32.

    Where nothing was found, masks and semantic map are computed when they are asked for; until then the image's
    features stay in memory.

    Attributes:
        logits: [1, Q, 1], of the class; upstream's `pred_logits`.
        boxes: [1, Q, 4], (cx, cy, w, h) in 0…1; upstream's `pred_boxes`.
        presence: [1, 1] logit; upstream's `presence_logit_dec`.
        scores: [1, Q], sigmoid(logits) · sigmoid(presence).
        boxes_xyxy: [1, Q, 4], (x0, y0, x1, y1) in 0…1.
    """

    logits: Floats
    boxes: Floats
    presence: Floats
    scores: Floats
    boxes_xyxy: Floats
    _head: SegmentationHead

    @cached_property
    def masks(self) -> Floats:
        """Mask logits [1, Q, 288, 288]; upstream's `pred_masks`."""
        return self._head.output("masks")

    @cached_property
    def semantic(self) -> Floats:
        """Logits of the semantic map [1, 1, 288, 288]; upstream's `semantic_seg`."""
        return self._head.output("semantic")


class SegmentationHead:
    """Masks and semantic map of one prompt, computed when they are first asked for; several threads may ask."""

    def __init__(self, compute: Callable[[], Tensors], fetch: Callable[[Any], npt.NDArray[Any]]) -> None:
        """Takes what computes the outputs of the entry point, and what returns a tensor's values."""
        self._compute: Callable[[], Tensors] | None = compute
        self._fetch = fetch
        self._tensors: Tensors = {}
        self._lock = threading.Lock()

    def tensor(self, name: str) -> Any:
        """The model's tensor `masks` or `semantic`."""
        with self._lock:
            if self._compute is not None:
                self._tensors = self._compute()
                self._compute = None  # it holds the image's features
        return self._tensors[name]

    def output(self, name: str) -> Floats:
        """The values of `tensor`."""
        return self._fetch(self.tensor(name))


@dataclass(frozen=True, eq=False)
class Found:
    """What a prompt found in an image of height h and width w: k objects, in the order of the model's queries.

    Attributes:
        masks: bool [k, h, w].
        boxes: fp32 [k, 4], (x0, y0, x1, y1) in pixels; as the model gives them, so they may reach beyond the image.
        scores: fp32 [k], each above the threshold.
        queries: int64 [k], the numbers of the queries that were kept.
        outputs: What this was made of.
        size: Width and height of the image.
        notes: A sentence for each part of the prompt that was not used as it was given.
    """

    masks: npt.NDArray[np.bool_]
    boxes: Floats
    scores: Floats
    queries: npt.NDArray[np.int64]
    outputs: Outputs
    size: tuple[int, int]
    notes: tuple[str, ...] = ()

    @cached_property
    def semantic(self) -> Floats:
        """Probability that a pixel shows what was asked for, whichever object it belongs to: fp32 [h, w]."""
        width, height = self.size
        (logits,) = resized(self.outputs.semantic[0], height, width)
        # The sigmoid, in a form that does not overflow.
        probability: Floats = np.ascontiguousarray((1 + np.tanh(logits / 2)) / 2)
        return probability


class Sam3:
    """A compiled model. Several threads may use it, and several models may be in one process.

    Example::

        model = Sam3.load("dist/sam3-llvm")
        image = model.set_image("photo.jpg")
        found = image.segment(text="cat", boxes=[(x0, y0, x1, y1)], box_labels=[True])
        found.masks, found.boxes, found.scores, found.semantic

        clicked = image.predict(points=[(x, y)])
        better = image.predict(points=[(x, y), (u, v)], labels=[1, 0], mask=clicked.logits[clicked.best])
        better.masks, better.iou, better.best

    Attributes:
        manifest: What the artifact says about itself.
    """

    def __init__(self, artifact: Loaded) -> None:
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

    @classmethod
    def load(cls, folder: str | Path, *, check: bool = True) -> Sam3:
        """Loads a folder that `sam3-tvm compile` wrote.

        Args:
            folder: The folder.
            check: Whether to compare every file with its checksum first.

        Raises:
            ArtifactError: It is no artifact, incomplete, damaged, or of another version.
            LoadError: It was compiled for another machine.
        """
        return cls(Artifact.load(folder, check=check))

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
        features = self._artifact.call("encode_image", pixels=prepared)
        self._artifact.release("encode_image")
        return EncodedImage(self, pixels, features)

    @property
    def artifact(self) -> Loaded:
        """The compiled model, whose entry points can be called one by one."""
        return self._artifact

    def start_session(self, video: Any, *, keep: bool = False) -> Session:
        """Begins to track objects through a video.

        Args:
            video: A file, a folder of images, a list or an array of frames, or an iterator of frames that may never
                end; see `harness.runtime.sam3.video.frames.open_frames`.
            keep: Whether to keep what is known of every frame, for each object 1 MB and a bit for each pixel of the
                video, so that objects can be prompted in any frame, and the video be tracked backwards and again.
                Otherwise memory does not grow.

        Raises:
            Sam3Error: The video cannot be opened, or this model was compiled without what tracks objects.
        """
        from harness.runtime.sam3.video.session import Session
        from harness.runtime.sam3.video.tracker import Tracker

        return Session(self, Tracker(self._artifact), video, keep=keep)

    def resume_session(self, path: str | Path, video: Any) -> Session:
        """Goes on with a session that `Session.save` wrote to a file, as if it had never been left.

        Args:
            path: The file.
            video: The video that the session was started with; of a stream, from its first frame on.

        Raises:
            Sam3Error: The file cannot be read, is damaged, or is of another model or another video; or as
                `start_session`.
        """
        from harness.runtime.sam3.video.saving import SessionFile

        saved = SessionFile(Path(path), self.manifest)
        session = self.start_session(video, keep=saved.keep)
        saved.fill(session.processor)
        return session

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
            encoded = dict(zip(new, self._encoded(list(new.values())), strict=True))
            self._artifact.release("encode_text")
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
        computed = self._artifact.call("interactive_features", trunk=features["trunk"])
        self._artifact.release("interactive_features")
        return computed

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

        def compute() -> Tensors:
            if SEGMENTATION_HEAD not in self.manifest.entries:
                return grounded
            return self._call_with(SEGMENTATION_HEAD, {**features, **grounded})

        return SegmentationHead(compute, self.fetch)

    def _call_with(self, entry: str, given: Tensors) -> Tensors:
        """Runs an entry point with those of the given tensors that it reads."""
        inputs = self.manifest.entries[entry].inputs
        return self._artifact.call(entry, **{spec.name: given[spec.name] for spec in inputs})

    def resize_masks(
        self, masks: Any, kept: npt.NDArray[np.int64], like: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.bool_]:
        """The masks bool [k, h, w] of the kept queries; `masks` are an image's logits, `like` its pixels."""
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

    def segment_each(self, prompts: Sequence[Prompt], threshold: float = THRESHOLD) -> Iterator[Found]:
        """Finds what each prompt asks for, one after the other, so that not all results are in memory at once.

        Their texts are encoded together. Nothing is run before all prompts have been checked.

        Args:
            prompts: Any number of prompts.
            threshold: What scores above it is kept.

        Raises:
            Sam3Error: A prompt asks nothing or makes no sense for this image.
        """
        if not 0 <= threshold <= 1:
            raise Sam3Error(f"The threshold {threshold} is no score; give a number from 0 to 1.")
        encoded = [self._model.encode_prompt(prompt, self.size) for prompt in prompts]
        return self._each(encoded, float(threshold))

    def _each(self, prompts: Sequence[EncodedPrompt], threshold: float) -> Iterator[Found]:
        texts = self._model.encode_texts([prompt.tokens for prompt in prompts])
        for prompt, text in zip(prompts, texts, strict=True):
            yield self._found(prompt, text, threshold)

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
            mask: Logits fp32 [288, 288] of an earlier prediction, to refine.
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
            masks=self._model.resize_masks(head.tensor("masks") if len(queries) else None, queries, self.pixels),
            boxes=outputs.boxes_xyxy[0, queries] * np.array([*self.size, *self.size], np.float32),
            scores=outputs.scores[0, queries],
            queries=queries,
            outputs=outputs,
            size=self.size,
            notes=prompt.notes,
        )

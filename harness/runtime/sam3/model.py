"""Loads a compiled SAM 3, which answers prompts on images and tracks objects through videos.

An image is encoded once and then takes any number of prompts. The meaning is that of upstream's
`sam3.model.sam3_image_processor.Sam3Processor`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Artifact, LoadedModel, Tensors
from harness.runtime.errors import ModelError
from harness.runtime.manifest import ArtifactError, Manifest
from harness.runtime.sam3.description import SAM_3_1, read_sam3_description
from harness.runtime.sam3.encoded_image import EncodedImage
from harness.runtime.sam3.images import to_pixels
from harness.runtime.sam3.interactive import EncodedObjectPrompt, ObjectPrompt, encode_object_prompt
from harness.runtime.sam3.prompts import EncodedPrompt, Prompt, check_prompt, encode_prompt
from harness.runtime.sam3.tokenizer import Tokenizer, pack_texts

if TYPE_CHECKING:
    from PIL import Image

    from harness.runtime.sam3.video.session import Session

REMEMBERED_TEXTS = 64
"""Encoded texts in a model's cache, the ones used last; each takes 32 KiB."""

ENTRIES = ("preprocess", "encode_image", "resize_masks")
GROUNDING = ("encode_text", "ground")
"""The entry points that find all objects of a prompt of text, boxes and points."""
INTERACTIVE = ("interactive_features", "predict_masks")
"""The entry points that predict masks of one object from clicks, a box or a mask."""


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

    @classmethod
    def load(cls, folder: str | Path, *, check: bool = True) -> Sam3:
        """Loads a folder that `sam3-tvm compile` wrote.

        Args:
            folder: The folder.
            check: Whether to compare every file with its checksum first.

        Raises:
            ArtifactError: The folder is no artifact, incomplete, damaged, or of another version.
            LoadError: The folder was compiled for another machine.
        """
        return cls(Artifact.load(folder, check=check))

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

    def call_with(self, entry: str, tensors: Tensors) -> Tensors:
        """Runs an entry point with those of the tensors that it reads."""
        inputs = self.manifest.entries[entry].inputs
        return self.artifact.call(entry, **{spec.name: tensors[spec.name] for spec in inputs})

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

    def start_session(self, video: Any, *, keep: bool = False) -> Session:
        """Starts a session that tracks objects through a video.

        Args:
            video: A file, a folder of images, a list or an array of frames, or an iterator of frames that may be
                endless; see `harness.runtime.sam3.video.frames.open_frames`.
            keep: Whether to keep the results of every frame, for each object 1 MB and a bit for each pixel of the
                video. Then objects can be prompted in any frame, and the video be tracked backwards and again.
                Otherwise memory does not grow.

        Raises:
            ModelError: The video cannot be opened, or this model was compiled without tracking.
        """
        # Images need fewer packages than videos.
        from harness.runtime.sam3.video.multiplex import MultiplexTracker
        from harness.runtime.sam3.video.session import Session
        from harness.runtime.sam3.video.tracker import Tracker

        tracker = MultiplexTracker if self.manifest.model == SAM_3_1 else Tracker
        return Session(self, tracker(self.artifact), video, tracker.rules, keep=keep)

    def resume_session(self, path: str | Path, video: Any) -> Session:
        """Continues a session that `Session.save` wrote to a file, as if it had not been interrupted.

        Args:
            path: The file.
            video: The video of the session; a stream must start with its first frame.

        Raises:
            ModelError: The file cannot be read, is damaged, or is of another model or another video; or an error of
                `start_session`.
        """
        from harness.runtime.sam3.video.saving import SessionFile

        saved = SessionFile(Path(path), self.manifest)
        session = self.start_session(video, keep=saved.keep)
        saved.restore(session.processor)
        return session

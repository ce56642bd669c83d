"""The photographs that are encoded at the moment, and asking them."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime import EncodedImage, ObjectPrompt, Prompt, Sam3
from harness.segment.asking import category_name, is_ambiguous, run_prompt
from harness.segment.coco import coco_annotations
from harness.segment.objects import best_object
from harness.ui.photographs import Photograph, Photographs

ENCODING, ASKING = "encoding", "asking"
"""What the model may be doing."""
_REMEMBERED_TIMES = 9

Logits = npt.NDArray[np.float32]
Announce = Callable[[str], object]
"""Takes `ENCODING` or `ASKING` when that starts."""


@dataclass(frozen=True, eq=False)
class Masks:
    """What a prompt found.

    Attributes:
        annotations: Entries of `harness.segment.coco.coco_annotations`.
        notes: A sentence for each part of the prompt that was not used as it was given.
        logits: fp32 [288, 288] of the one mask of a prompt for one object, to refine it; None of other prompts.
    """

    annotations: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]
    logits: Logits | None = None


class Encodings:
    """Asks a model about photographs, and keeps those encoded that were asked last. One thread uses it."""

    def __init__(self, model: Sam3, photographs: Photographs, most: int) -> None:
        """Keep at most `most` encoded photographs."""
        self._model = model
        self._photographs = photographs
        self._most = most
        self._encoded: OrderedDict[str, EncodedImage] = OrderedDict()
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_TIMES)

    @property
    def expected_seconds(self) -> float | None:
        """Median time of the last encodings; None before the first."""
        times = list(self._seconds)
        return statistics.median(times) if times else None

    def encoded(self, photograph: Photograph, announce: Announce) -> EncodedImage:
        """Returns a photograph encoded; one that is not any more is encoded again.

        Raises:
            Sam3Error: It cannot be read any more.
        """
        known = self._encoded.get(photograph.key)
        if known is not None:
            self._encoded.move_to_end(photograph.key)
            return known
        announce(ENCODING)
        while len(self._encoded) >= self._most:
            self._encoded.popitem(last=False)
        start = time.perf_counter()
        encoded = self._model.set_image(self._photographs.pixels(photograph))
        self._seconds.append(time.perf_counter() - start)
        self._encoded[photograph.key] = encoded
        return encoded

    def predict(self, photograph: Photograph, prompt: ObjectPrompt, announce: Announce) -> Masks:
        """Predicts the best mask of one object, as `sam3-tvm segment --click` does.

        Raises:
            Sam3Error: The prompt makes no sense for this photograph or this model.
        """
        image = self.encoded(photograph, announce)
        announce(ASKING)
        (predicted,) = image.predict_batch([prompt], multimask=is_ambiguous(prompt))
        objects = best_object(predicted, category_name(prompt))
        return Masks(tuple(coco_annotations(objects)), objects.notes, predicted.logits[predicted.best])

    def find(self, photograph: Photograph, prompt: Prompt, threshold: float, announce: Announce) -> Masks:
        """Finds all of a kind, as `sam3-tvm segment --text` does.

        Raises:
            Sam3Error: The prompt makes no sense for this photograph or this model.
        """
        image = self.encoded(photograph, announce)
        announce(ASKING)
        objects = run_prompt(image, prompt, threshold)
        return Masks(tuple(coco_annotations(objects)), objects.notes)

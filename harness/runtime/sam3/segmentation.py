"""Defines the result of a prompt in an image, and the outputs of the model that it is made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats
from harness.runtime.artifact import LoadedModel, Tensors, call_with
from harness.runtime.sam3.resizing import resize

Queries = npt.NDArray[np.int64]

EMBED_PIXELS, MASK_PREDICTOR = "embed_pixels", "mask_predictor"
"""The entry points that predict the masks of some of the queries."""
SEGMENTATION_HEAD = "segmentation_head"
"""The entry point that predicts the masks of all queries in older folders; in still older ones `ground` does."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """The model's outputs for one prompt, before any decision: Q = 200 queries, all fp32.

    The masks of all queries and the semantic map are computed at their first use. Until then the image's features stay
    in memory if nothing was found; otherwise the inputs of the mask predictor stay, 85 MB.

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
        return self._head.logits(np.arange(self.scores.shape[1]))[None]

    @cached_property
    def semantic(self) -> Floats:
        """Logits of the semantic map [1, 1, 288, 288]; upstream's `semantic_seg`."""
        return self._head.semantic()


class SegmentationHead:
    """The masks and the semantic map of one prompt, computed at their first use; several threads may use it."""

    def __init__(self, artifact: LoadedModel, features: Tensors, grounded: Tensors) -> None:
        """Stores a model and the outputs of its entry points `encode_image` and `ground`; computes nothing."""
        self._artifact, self._queries = artifact, grounded.get("hs")  # the oldest folders have none
        self._inputs: Tensors | None = {**features, **grounded}
        self._embedded: Tensors = {}
        self._lock = threading.Lock()

    def masks(self, queries: Queries) -> Iterator[tuple[Any, Queries]]:
        """Yields the masks of the queries, int64 [k], in their order; computes nothing for no queries.

        A batch is the model's tensor fp32 [1, n, 288, 288], which may have masks of other queries too, and int64 [k],
        the index of each query's mask among the n.
        """
        if not len(queries):
            return
        embedded, entries = self._pixels(), self._artifact.manifest.entries
        if MASK_PREDICTOR not in entries:
            yield embedded["masks"], queries
            return
        hs = self._artifact.fetch(self._queries)
        (shape,) = (spec.shape for spec in entries[MASK_PREDICTOR].inputs if spec.name == "hs")
        batch_size = int(shape[2])
        for start in range(0, len(queries), batch_size):
            batch = queries[start : start + batch_size]
            rows = np.zeros((1, 1, batch_size, hs.shape[3]), np.float32)
            rows[:, :, : len(batch)] = hs[:, :, batch]
            masks = call_with(self._artifact, MASK_PREDICTOR, {**embedded, "hs": rows})
            yield masks["masks"], np.arange(len(batch))

    def logits(self, queries: Queries) -> Floats:
        """Returns the masks fp32 [k, 288, 288] of these queries, at least one."""
        fetch = self._artifact.fetch
        return np.concatenate([fetch(logits)[0, rows] for logits, rows in self.masks(queries)])

    def semantic(self) -> Floats:
        """Returns the logits of the semantic map [1, 1, 288, 288]."""
        return self._artifact.fetch(self._pixels()["semantic"])

    def _pixels(self) -> Tensors:
        """Computes once the inputs of the mask predictor and the semantic map; in older folders all masks."""
        with self._lock:
            if self._inputs is not None:
                entries = self._artifact.manifest.entries
                entry = next((name for name in (EMBED_PIXELS, SEGMENTATION_HEAD) if name in entries), None)
                self._embedded = call_with(self._artifact, entry, self._inputs) if entry else self._inputs
                self._inputs = None  # it holds the image's features
        return self._embedded


@dataclass(frozen=True, eq=False)
class Found:
    """The result of a prompt in an image of height h and width w: k objects, in the order of the model's queries.

    Attributes:
        predict: Yields the masks in order, in batches bool [n, h, w]; `masks` and `each_mask` call it.
        boxes: fp32 [k, 4], (x0, y0, x1, y1) in pixels; unclipped, so that they may reach beyond the image.
        scores: fp32 [k], each above the threshold.
        queries: int64 [k], the numbers of the queries above the threshold.
        outputs: The model's outputs.
        size: Width and height of the image.
        notes: A sentence for each part of the prompt that was changed or ignored.
    """

    predict: Callable[[], Iterator[npt.NDArray[np.bool_]]]
    boxes: Floats
    scores: Floats
    queries: Queries
    outputs: Outputs
    size: tuple[int, int]
    notes: tuple[str, ...] = ()

    @cached_property
    def masks(self) -> npt.NDArray[np.bool_]:
        """All masks, bool [k, h, w]."""
        width, height = self.size
        masks = np.empty((len(self.queries), height, width), bool)
        filled = 0
        for batch in self.predict():
            masks[filled : filled + len(batch)] = batch
            filled += len(batch)
        return masks

    def each_mask(self) -> Iterator[npt.NDArray[np.bool_]]:
        """Yields the masks bool [h, w] one after another, because all of them may not fit into memory."""
        for batch in [self.masks] if "masks" in vars(self) else self.predict():
            yield from batch

    @cached_property
    def semantic(self) -> Floats:
        """Probability that a pixel shows an object of the prompt, whichever object it is: fp32 [h, w]."""
        width, height = self.size
        (logits,) = resize(self.outputs.semantic[0], height, width)
        # The sigmoid, in a form that does not overflow.
        probability: Floats = np.ascontiguousarray((1 + np.tanh(logits / 2)) / 2)
        return probability

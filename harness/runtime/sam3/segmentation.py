"""Defines the result of a prompt in an image, and the outputs of the model that it is made of."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.artifact import Tensors
from harness.runtime.sam3.resizing import resize

Floats = npt.NDArray[np.float32]
Queries = npt.NDArray[np.int64]


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


@dataclass(frozen=True, eq=False)
class MaskBatch:
    """The masks of some queries, as the model returns them.

    Attributes:
        logits: The model's tensor fp32 [1, n, 288, 288], which may have masks of other queries too.
        rows: int64 [k], the index of each query's mask among the n.
    """

    logits: Any
    rows: Queries


class SegmentationHead:
    """The masks and the semantic map of one prompt, computed at their first use; several threads may use it."""

    def __init__(
        self,
        embed: Callable[[], Tensors],
        predict: Callable[[Tensors, Queries], Iterator[MaskBatch]],
        fetch: Callable[[Any], npt.NDArray[Any]],
    ) -> None:
        """Stores the functions that compute masks.

        Args:
            embed: Computes the inputs of the mask predictor; it is called once.
            predict: Predicts the masks of queries from these inputs, in the order of the queries.
            fetch: Returns the values of a tensor.
        """
        self._embed: Callable[[], Tensors] | None = embed
        self._predict, self._fetch = predict, fetch
        self._embedded: Tensors = {}
        self._lock = threading.Lock()

    def masks(self, queries: Queries) -> Iterator[MaskBatch]:
        """Yields the masks of the queries, int64 [k], in their order; computes nothing for no queries."""
        if len(queries):
            yield from self._predict(self._pixels(), queries)

    def logits(self, queries: Queries) -> Floats:
        """Returns the masks fp32 [k, 288, 288] of these queries, at least one."""
        return np.concatenate([self._fetch(batch.logits)[0, batch.rows] for batch in self.masks(queries)])

    def semantic(self) -> Floats:
        """Returns the logits of the semantic map [1, 1, 288, 288]."""
        return self._fetch(self._pixels()["semantic"])

    def _pixels(self) -> Tensors:
        with self._lock:
            if self._embed is not None:
                self._embedded = self._embed()
                self._embed = None  # it holds the image's features
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

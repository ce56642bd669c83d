"""Makes upstream's video model go on from the compiled model's logits, which differ from its own by rounding alone.

Each frame is tracked from memories of earlier frames. Where an error of rounding decides whether a hole is filled, or
which of two objects owns a pixel, the memories of two correct models differ by more than rounding from there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.core.program import Array, Arrays
from harness.models.sam3.patches.patch import wrapped

SCORE_GATE = 1e-5
"""Relative and absolute tolerance of the scores of detections, which are outputs."""
NEAR = 1e-3
"""Share of the largest logit of a frame by which logits are moved up and down: rounding of memories moved a logit by a
fifth of that in 36 frames."""
ABSENT_LOGIT = 1024
"""Magnitude of the logits of an absent object."""
OBJECT_LOGIT_LEEWAY = 1e-3
"""Absolute tolerance of object logits, which are near 10; rounding of memories moved one by 5e-4 in 11 frames."""


def leeway(logits: Array) -> float:
    """Returns the distance by which the mask logits [H, W] of an object may be moved."""
    return float(NEAR * np.abs(np.where(np.abs(logits) < ABSENT_LOGIT, logits, 0)).max())


class NotRoundingError(Exception):
    """The compiled model's logits differ from upstream's by more than rounding."""


class Following:
    """The compiled model's logits on each frame, which upstream's video model takes in place of its own.

    It takes them in the order in which they were computed. The frame's logits are compared with upstream's own, which
    are computed from the memories of the logits that were taken before.
    """

    def __init__(self, computed: Mapping[int, Arrays]) -> None:
        """Takes the arrays of `harness.models.sam3.video.compiled.RecordingTracker` by frame."""
        self._computed = computed
        self._taken: Counter[tuple[int, str]] = Counter()

    @contextmanager
    def running(self, model: Any) -> Iterator[None]:
        """Replaces the logits of tracked, clicked and detected objects for the duration of the context.

        Upstream then raises `NotRoundingError` on the first frame whose logits differ by more than rounding.
        """
        with (
            wrapped(model.tracker, "track_step", self._track_step),
            wrapped(model, "run_backbone_and_detection", self._detect),
        ):
            yield

    def _track_step(self, original: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
        out = original(**arguments)
        if arguments["mask_inputs"] is None:
            kind = "" if arguments["point_inputs"] is None else "clicked_"
            logits, object_logits = out["pred_masks"][:, 0], out["object_score_logits"][:, 0]
            frame = arguments["frame_idx"]
            out["pred_masks"] = self._take_logits(frame, f"{kind}logits", logits)[:, None]
            out["object_score_logits"] = self._take(
                frame, f"{kind}object_logits", object_logits, np.full(len(logits), OBJECT_LOGIT_LEEWAY)
            )[:, None]
        return out

    def _detect(self, original: Callable[..., dict[str, Tensor]], **arguments: Any) -> dict[str, Tensor]:
        out, frame = original(**arguments), arguments["frame_idx"]
        scores = out["scores"]
        if not len(scores) or not len(self._remaining(frame, "detected_scores")):
            return out  # upstream also detects on the frame of a click, for its features alone
        gate = SCORE_GATE + SCORE_GATE * np.abs(scores.numpy())
        return out | {
            "mask": self._take_logits(frame, "detected_logits", out["mask"]),
            "scores": self._take(frame, "detected_scores", scores, gate),
        }

    def _take_logits(self, frame: int, name: str, values: Tensor) -> Tensor:
        return self._take(frame, name, values, np.array([leeway(logits) for logits in values.numpy()])[:, None, None])

    def _take(self, frame: int, name: str, values: Tensor, tolerance: Array) -> Tensor:
        """Returns the next rows of the compiled model's array, as many as upstream's own.

        Raises:
            NotRoundingError: There are not as many, or one differs by more than the tolerance.
        """
        rows = self._remaining(frame, name)[: len(values)]
        self._taken[frame, name] += len(values)
        if rows.shape != values.shape or not (np.abs(rows - values.numpy()) <= tolerance).all():
            raise NotRoundingError(f"{name} of frame {frame} differ by more than rounding")
        return torch.from_numpy(rows.copy())

    def _remaining(self, frame: int, name: str) -> Array:
        """Returns the rows of the compiled model's array that were not taken yet."""
        return self._computed.get(frame, {}).get(name, np.zeros(0))[self._taken[frame, name] :]

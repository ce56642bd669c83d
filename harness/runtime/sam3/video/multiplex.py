"""Runs the tracker of a compiled SAM 3.1, which tracks the sixteen objects of a bucket in one call.

VM is upstream's model/video_tracking_multiplex.py, on its main branch of July 2026.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats
from harness.runtime.artifact import Tensors
from harness.runtime.sam3.video.memory_bank import (
    MISSING_MASK_LOGIT,
    MULTIPLEX_RULES,
    AttentionInputs,
    MemoryBank,
    PromptOutput,
    Retention,
)
from harness.runtime.sam3.video.rules import MULTIPLEX
from harness.runtime.sam3.video.slots import Placement, Slots
from harness.runtime.sam3.video.tracker import (
    POINTERS,
    Bits,
    TrackedMasks,
    Tracker,
    from_bfloat16,
    to_bfloat16,
)

MEMORIES = (7, 10)
"""Memories that `track_objects_7` and `track_objects_10` take: of one conditioning frame, as in a video without
clicks, or of four, and of six other frames."""
PROPAGATION_FEATURES = ("propagation_high_res_0", "propagation_high_res_1", "features")
"""Outputs of the entry point `interactive_features` that tracking reads."""


class MultiplexTracker(Tracker):
    """Calls the entry points of SAM 3.1 for tracking, one bucket after another."""

    rules = MULTIPLEX
    entries = (
        "interactive_features",
        "predict_masks",
        *(f"track_objects_{count}" for count in MEMORIES),
        "encode_memory",
        "encode_predicted_memory",
        "mask_pointer",
    )

    def new_bank(self, objects: tuple[int, ...], retention: Retention) -> MemoryBank:
        """Returns an empty bank for new objects, in slots of new buckets."""
        return MemoryBank(objects, retention, MULTIPLEX_RULES, slots=Slots().add(len(objects)))

    def remembered_features(self, features: Tensors) -> Floats:
        """Returns the features fp32 [1, 256, 72, 72] of a frame, to which later frames attend beside its memory."""
        fetched: Floats = self._artifact.fetch(features["features"])
        return fetched

    def track(self, features: Tensors, attended: AttentionInputs, slots: Slots | None = None) -> TrackedMasks:
        """Predicts the masks of objects on a frame that attends to their memories (`_track_step_aux`, VM:1950)."""
        assert slots is not None
        outputs = [self._track_bucket(features, attended, bucket, slots) for bucket in range(len(slots.taken))]
        masks, iou, object_logits, pointers = (
            slots.demux(np.concatenate([output[name] for output in outputs]))
            for name in ("masks", "iou", "object_logits", "pointers")
        )
        objects, best = np.arange(len(masks)), iou.argmax(axis=1)
        return TrackedMasks(
            logits=np.where(object_logits[:, :, None] > 0, masks[objects, best], MISSING_MASK_LOGIT),
            pointers=pointers[objects, best],
            object_logits=object_logits,
            iou=iou,
        )

    def use_mask(self, features: Tensors, mask: Floats) -> PromptOutput:
        """Returns the output for a given mask fp32 [1152, 1152], from 0 to 1 (`_use_mask_as_output`, VM:935)."""
        outputs = self._fetch(
            self._artifact.call(
                "mask_pointer",
                image_embed=features["image_embedding"],
                high_res_0=features["high_res_0"],
                high_res_1=features["high_res_1"],
                masks=np.ascontiguousarray(mask)[None, None],
            )
        )
        return PromptOutput(outputs["pointers"], outputs["object_logits"], np.ones((1, 1), np.float32))

    def encode_memory(
        self, features: Tensors, logits: Floats, object_logits: Floats, placement: Placement | None = None
    ) -> Bits:
        """Encodes masks fp32 [n, 1152, 1152] of tracked objects to memories [buckets, 256, 72, 72] (VM:1649).

        Args:
            features: The frame's.
            logits: fp32 [n, 1152, 1152].
            object_logits: fp32 [n].
            placement: The objects' slots, and which of them have a prompt on the frame.
        """
        return self._encode_buckets("encode_memory", features, logits, object_logits, placement)

    def encode_predicted_memory(
        self, features: Tensors, logits: Floats, object_logits: Floats, placement: Placement | None = None
    ) -> Bits:
        """Encodes masks fp32 [n, 1008, 1008] of prompts or predictions, as `encode_memory` does."""
        return self._encode_buckets("encode_predicted_memory", features, logits, object_logits, placement)

    def encode_prompt_memory(
        self, features: Tensors, logits: Floats, object_logits: Floats, placement: Placement | None = None
    ) -> Bits:
        """Encodes masks of prompts as `encode_predicted_memory` does; SAM 3.1 does not binarize them."""
        return self.encode_predicted_memory(features, logits, object_logits, placement)

    def _encode_buckets(
        self, entry: str, features: Tensors, logits: Floats, object_logits: Floats, placement: Placement | None
    ) -> Bits:
        assert placement is not None
        slots = placement.slots
        inputs = {
            "masks": slots.mux(logits),
            "object_logits": slots.mux(object_logits[:, None]),
            "valid": slots.valid,
            "conditioning": slots.mux(placement.given),
        }
        calls = (
            self._artifact.call(
                entry,
                features=features["features"],
                **{name: values[bucket : bucket + 1] for name, values in inputs.items()},
            )
            for bucket in range(len(slots.taken))
        )
        return to_bfloat16(np.concatenate([self._artifact.fetch(outputs["memory"]) for outputs in calls]))

    def _track_bucket(
        self, features: Tensors, attended: AttentionInputs, bucket: int, slots: Slots
    ) -> dict[str, Floats]:
        """Returns the outputs of an entry point `track_objects_…` for a bucket, by name."""
        columns = slice(bucket, bucket + 1)
        places = next(count for count in MEMORIES if count >= len(attended.memories))
        assert attended.features is not None
        return self._fetch(
            self._artifact.call(
                f"track_objects_{places}",
                **{name.removeprefix("propagation_"): features[name] for name in PROPAGATION_FEATURES},
                memory_features=_padded(attended.features, places),
                memories=_padded(from_bfloat16(attended.memories[:, columns]), places),
                ranks=_padded(attended.ranks, places),
                has_memory=np.arange(places) < len(attended.memories),
                pointers=_padded(attended.pointers[:, columns], POINTERS),
                times=_padded(attended.times, POINTERS),
                has_pointer=np.arange(POINTERS) < len(attended.pointers),
                valid=slots.valid[columns],
            )
        )


def _padded(values: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """Returns values [n, …] with zeros up to `count`."""
    padded = np.zeros((count, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded

"""Runs the tracker of the compiled model: masks from memories, pointers, new memories.

TB is upstream's model/sam3_tracker_base.py and TP its model/sam3_tracking_predictor.py, with the lines of sam3 0.1.4.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.runtime.arrays import Floats
from harness.runtime.artifact import LoadedModel, Tensors
from harness.runtime.errors import ModelError
from harness.runtime.sam3.description import Capacity, read_sam3_description
from harness.runtime.sam3.images import MASK_SIZE
from harness.runtime.sam3.interactive import ABSENT, CORNERS, PAD, EncodedObjectPrompt, select_masks
from harness.runtime.sam3.video.memory_bank import (
    MISSING_MASK_LOGIT,
    AttentionInputs,
    MemoryBank,
    PromptOutput,
    Retention,
)
from harness.runtime.sam3.video.rules import DISAMBIGUATED, Rules
from harness.runtime.sam3.video.slots import Placement, Slots

Bits = npt.NDArray[np.uint16]
_QUIET_NAN = np.uint16(0x7FC0)


def to_bfloat16(values: Floats) -> Bits:
    """Returns the bits of fp32 values rounded to bfloat16, half to even, as PyTorch rounds.

    Every NaN becomes the quiet one.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Adds half of the dropped bits, less one where the last kept bit is even; the carry into the exponent is correct.
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), _QUIET_NAN, rounded)


def from_bfloat16(bits: Bits) -> Floats:
    """Returns the fp32 values of bfloat16 bits, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


INPUT_MASK_SIZE = 1152
"""Height and width of a given mask, and of one that is encoded into a memory (`input_mask_size`, TB:116)."""
PROMPT_MASK_SIZE = 1008
"""Height and width of a prompt's mask before it is encoded (`image_size`)."""
POINTERS = 20
"""Pointers that the entry point `object_pointers` takes; upstream's rules give at most 19."""
_POINTER_TOKENS = 4
"""Number of keys that a pointer is split into (TB:760)."""


class TrackedMasks(NamedTuple):
    """The model's prediction of B objects on a frame.

    Attributes:
        logits: fp32 [B, 288, 288], of the best of three masks; -1024 everywhere where the object is absent.
        pointers: fp32 [B, 256].
        object_logits: fp32 [B, 1], above zero where the object is present.
        iou: fp32 [B, 3], predicted for the three masks.
    """

    logits: Floats
    pointers: Floats
    object_logits: Floats
    iou: Floats


class Tracker:
    """Calls the entry points for tracking; all decisions are made elsewhere.

    Pointers of all objects become keys in one call. The expensive entry points run for one object after another: a
    batch would take as long, and more memory in proportion to its objects (docs/evidence/log/).

    `features` are a frame's, from the entry point `interactive_features`.

    Attributes:
        entries: The entry points that tracking needs besides those that find objects.
        rules: Upstream's thresholds for the model.
    """

    rules: ClassVar[Rules] = DISAMBIGUATED

    entries: ClassVar[tuple[str, ...]] = (
        "interactive_features",
        "predict_masks",
        "object_pointers",
        "memory_attention",
        "encode_memory",
        "encode_predicted_memory",
        "mask_pointer",
    )

    def __init__(self, artifact: LoadedModel) -> None:
        """Checks the entry points of a loaded model.

        Raises:
            ModelError: The model was compiled without tracking.
        """
        if missing := [name for name in self.entries if name not in artifact.manifest.entries]:
            raise ModelError(
                f"This model has no entry point {missing[0]}, so it tracks nothing; compile it again with "
                "`sam3-tvm compile --video`."
            )
        self._artifact = artifact
        self._capacity: Capacity = read_sam3_description(artifact.folder, artifact.manifest).capacity

    def new_bank(self, objects: tuple[int, ...], retention: Retention) -> MemoryBank:
        """Returns an empty bank for new objects."""
        return MemoryBank(objects, retention)

    def remembered_features(self, _features: Tensors) -> Floats | None:
        """Returns the features of a frame that its memory has beside it; SAM 3 has none."""
        return None

    def track(self, features: Tensors, attended: AttentionInputs, _slots: Slots | None = None) -> TrackedMasks:
        """Predicts the masks of B objects on a frame that attends to their memories (`track_step`, TB:925)."""
        tokens = self._pointer_tokens(attended)
        count = attended.memories.shape[1]
        outputs = [self._track_object(features, attended, tokens, row) for row in range(count)]
        return TrackedMasks(*map(np.stack, zip(*outputs, strict=True)))

    def decode_prompt(self, features: Tensors, prompt: EncodedObjectPrompt) -> tuple[PromptOutput, Floats]:
        """Predicts an object from points or a box without memories (VI:965); returns its mask logits [288, 288], too.

        One point is answered with the best of three masks (`_use_multimask`, TB:1108).
        """
        points = int((prompt.inputs["labels"] >= 0).sum())
        decoded = self._decode(features, features["image_embedding"], prompt.inputs, multimask=points <= 1)
        output = PromptOutput(decoded.pointers[None], decoded.object_logits[None], decoded.iou[None])
        return output, decoded.logits

    def use_mask(self, features: Tensors, mask: Floats) -> PromptOutput:
        """Returns the output for a given mask fp32 [1152, 1152], from 0 to 1 (`_use_mask_as_output`, TB:389)."""
        outputs = self._fetch(
            self._artifact.call(
                "mask_pointer",
                features=features["features"],
                high_res_0=features["high_res_0"],
                high_res_1=features["high_res_1"],
                masks=np.ascontiguousarray(mask)[None, None],
            )
        )
        return PromptOutput(outputs["pointers"], outputs["object_logits"], np.ones((1, 1), np.float32))

    def encode_memory(
        self, features: Tensors, logits: Floats, object_logits: Floats, _placement: Placement | None = None
    ) -> Bits:
        """Encodes the masks of B objects on a tracked frame, rounded to bfloat16 as upstream keeps them (TP:1150).

        Args:
            features: The frame's.
            logits: fp32 [B, 1152, 1152].
            object_logits: fp32 [B]; a value that is not above zero means that the object is absent.
        """
        return self._encode("encode_memory", features, logits, object_logits)

    def encode_prompt_memory(
        self, features: Tensors, logits: Floats, object_logits: Floats, _placement: Placement | None = None
    ) -> Bits:
        """Encodes masks of prompts, fp32 [B, 1008, 1008], of which only the signs count (TB:818)."""
        saturated = np.where(logits > 0, -MISSING_MASK_LOGIT, MISSING_MASK_LOGIT)
        return self._encode("encode_predicted_memory", features, saturated, object_logits)

    def encode_predicted_memory(
        self, features: Tensors, logits: Floats, object_logits: Floats, _placement: Placement | None = None
    ) -> Bits:
        """Encodes masks fp32 [B, 1008, 1008] as the model predicts them, without a plan (TB:1030)."""
        return self._encode("encode_predicted_memory", features, logits, object_logits)

    def _pointer_tokens(self, attended: AttentionInputs) -> dict[str, Floats]:
        """Returns the keys of P pointers of B objects and their positions, fp32 [4·P, B, 64]."""
        count = len(attended.pointers)
        pointers = np.zeros((POINTERS, *attended.pointers.shape[1:]), np.float32)
        times = np.zeros(POINTERS, np.float32)
        pointers[:count], times[:count] = attended.pointers, attended.times
        tokens = self._fetch(self._artifact.call("object_pointers", pointers=pointers, times=times))
        return {name: values[: _POINTER_TOKENS * count] for name, values in tokens.items()}

    def _track_object(
        self, features: Tensors, attended: AttentionInputs, tokens: dict[str, Floats], row: int
    ) -> TrackedMasks:
        """Returns the prediction of one object, without the first axis."""
        columns = slice(row, row + 1)
        conditioned = self._artifact.call(
            "memory_attention",
            features=features["features"],
            memories=from_bfloat16(attended.memories[:, columns]),
            ranks=attended.ranks,
            pointers=tokens["pointer_tokens"][:, columns],
            pointer_pos=tokens["pointer_pos"][:, columns],
        )
        return self._decode(features, conditioned["conditioned"], self._empty_prompt(), multimask=True)

    def _decode(self, features: Tensors, embedding: Any, prompt: Tensors, *, multimask: bool) -> TrackedMasks:
        """Returns the best mask of one object, without the first axis (`_forward_sam_heads`, TB:234)."""
        high_res = {name: features[name] for name in ("high_res_0", "high_res_1")}
        outputs = self._fetch(self._artifact.call("predict_masks", image_embedding=embedding, **high_res, **prompt))
        logits, iou = select_masks(outputs["masks"][0], outputs["iou"][0], multimask)
        best = int(iou.argmax())
        is_present = outputs["object_score"][0, 0] > 0
        return TrackedMasks(
            logits=logits[best] if is_present else np.full_like(logits[best], MISSING_MASK_LOGIT),
            # The token of the single mask is the first one, also where its mask is replaced by a better one.
            pointers=outputs["pointers"][0, 1 + best if multimask else 0],
            object_logits=outputs["object_score"][0],
            iou=iou,
        )

    def _empty_prompt(self) -> dict[str, npt.NDArray[Any]]:
        """Returns an empty prompt: upstream's empty point, and the padding point after it (TB:279)."""
        places = self._capacity.clicks + len(CORNERS) + 1
        labels = np.full((1, places), ABSENT, np.int64)
        labels[0, :2] = PAD
        return {
            "coordinates": np.zeros((1, places, 2), np.float32),
            "labels": labels,
            "mask": np.zeros((1, 1, MASK_SIZE, MASK_SIZE), np.float32),
            "has_mask": np.zeros(1, bool),
        }

    def _encode(self, entry: str, features: Tensors, logits: Floats, object_logits: Floats) -> Bits:
        """Encodes masks [B, S, S] by an entry point, one object after another, to bfloat16 bits [B, 64, 72, 72]."""
        memories = [
            self._fetch(
                self._artifact.call(
                    entry,
                    features=features["features"],
                    masks=np.ascontiguousarray(mask)[None, None],
                    object_logits=np.full((1, 1), logit, np.float32),
                )
            )["memory"]
            for mask, logit in zip(logits, object_logits, strict=True)
        ]
        return to_bfloat16(np.concatenate(memories))

    def _fetch(self, tensors: Tensors) -> dict[str, Any]:
        return {name: self._artifact.fetch(tensor) for name, tensor in tensors.items()}

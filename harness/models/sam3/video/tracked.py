"""The compiled model through a video, as its users drive it, and what its tracker computes on the way."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.program import Arrays
from harness.models.sam3.video.questions import Pixels, Question, frames_of
from harness.models.sam3.video.source import AskedStep
from harness.runtime.artifact import LoadedModel, Tensors
from harness.runtime.sam3.interactive import MASK_SIZE
from harness.runtime.sam3.model import Sam3
from harness.runtime.sam3.video.bfloat16 import Bits
from harness.runtime.sam3.video.frames import Frames
from harness.runtime.sam3.video.memory_bank import AttentionInputs
from harness.runtime.sam3.video.session import Session, TrackedFrame
from harness.runtime.sam3.video.tracker import TrackedMasks, Tracker

Floats = npt.NDArray[np.float32]


@dataclass(eq=False)
class _Computed:
    """What the tracker computes on a frame, bucket by bucket."""

    logits: list[Floats] = field(default_factory=list)
    object_logits: list[Floats] = field(default_factory=list)
    memories: list[Bits] = field(default_factory=list)
    remembered: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    births: int = 0

    def arrays(self) -> Arrays:
        """All buckets together; names as in `harness.models.sam3.video.upstream.PARTS`."""
        return {
            "logits": np.concatenate([np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32), *self.logits]),
            "object_logits": np.concatenate([np.zeros(0, np.float32), *self.object_logits]),
            "memories": np.concatenate([np.zeros((0, 64, 72, 72), np.uint16), *self.memories]),
            "remembered": np.concatenate([np.zeros(0, bool), *self.remembered]),
            "births": np.array([self.births]),
        }


class RecordingTracker(Tracker):
    """The compiled model's tracker, which keeps what it computes.

    Attributes:
        frame: The frame that is processed.
        computed: By frame.
    """

    def __init__(self, artifact: LoadedModel) -> None:
        """Takes a loaded model; see `Tracker`."""
        super().__init__(artifact)
        self.frame = 0
        self.computed: dict[int, _Computed] = {}

    def track(self, features: Tensors, attended: AttentionInputs) -> TrackedMasks:
        """See `Tracker.track`."""
        found = super().track(features, attended)
        self._now.logits.append(found.logits)
        self._now.object_logits.append(found.object_logits[:, 0])
        return found

    def encode_memory(self, features: Tensors, logits: Floats, object_logits: Floats) -> Bits:
        """See `Tracker.encode_memory`."""
        bits = super().encode_memory(features, logits, object_logits)
        self._now.memories.append(bits)
        self._now.remembered.append(object_logits > 0)
        return bits

    def encode_prompt_memory(self, features: Tensors, logits: Floats, object_logits: Floats) -> Bits:
        """See `Tracker.encode_prompt_memory`; here it is that of new objects."""
        self._now.births += len(logits)
        return super().encode_prompt_memory(features, logits, object_logits)

    @property
    def _now(self) -> _Computed:
        return self.computed.setdefault(self.frame, _Computed())


def answered(model: Sam3, question: Question) -> Arrays:
    """What the compiled model answers to a question.

    Returns:
        Arrays by answer and name, as `harness.models.sam3.video.source.Answer` has them, with boxes (x0, y0, x1, y1) in
        pixels; `births` int64 [1] of each frame; and `left` int64 [1], the number of objects in the end.
    """
    frames = frames_of(question)
    tracker = RecordingTracker(model.artifact)
    session = Session(model, tracker, _told(frames, tracker))
    height, width = frames[0].shape[:2]
    box = None if question.box is None else np.array(question.box) * (width, height, width, height)
    arrays = _shown(0, session.add_prompt(question.frame, question.text, box))
    tracker.computed.clear()
    for number, frame in enumerate(session.propagate(), start=1):
        arrays |= _shown(number, frame)
    for number, index in enumerate(range(question.frame, question.length), start=1):
        computed = tracker.computed.get(index, _Computed()).arrays()
        arrays |= {f"{number}/{name}": array for name, array in computed.items()}
    return arrays | {"left": np.array([len(session.objects)])}


def stepped(model: Sam3, step: AskedStep, length: int) -> Arrays:
    """What the compiled model computes from PyTorch's own state, by the names in `STEP`, and `rounded`.

    Args:
        model: The model.
        step: The state.
        length: The number of frames of the video.
    """
    observed = _ObservedMemories(model.artifact)
    tracker = Tracker(observed)
    found = tracker.track(step.features, step.bank.read(step.bank.plan(step.frame, num_frames=length)))
    bits = tracker.encode_memory(step.features, step.masks, step.present)
    return {
        "logits": found.logits,
        "pointers": found.pointers,
        "object_logits": found.object_logits,
        "iou": found.iou.max(axis=-1),
        "memory": np.concatenate(observed.memories),
        "rounded": bits,
    }


class _ObservedMemories:
    """A loaded model that keeps the memories that it encodes, as they are before they are rounded."""

    def __init__(self, artifact: LoadedModel) -> None:
        self._artifact = artifact
        self.folder, self.manifest = artifact.folder, artifact.manifest
        self.fetch, self.reading_once = artifact.fetch, artifact.reading_once
        self.memories: list[Floats] = []

    def call(self, entry: str, **inputs: Any) -> Tensors:
        outputs = self._artifact.call(entry, **inputs)
        if entry == "encode_memory":
            self.memories.append(self._artifact.fetch(outputs["memory"]))
        return outputs


def _told(frames: Sequence[Pixels], tracker: RecordingTracker) -> Frames:
    """Frames that tell a tracker which of them is read: the one that is processed next."""

    def read() -> Generator[Pixels, None, None]:
        for index, frame in enumerate(frames):
            tracker.frame = index
            yield frame

    return Frames("the video", read, len(frames))


def _shown(number: int, frame: TrackedFrame) -> Arrays:
    return {f"{number}/{name}": getattr(frame, name) for name in ("ids", "scores", "boxes", "masks")}

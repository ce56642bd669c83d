"""Runs the compiled model through a video as its users do, and records the results of its tracker."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.program import Arrays
from harness.models.sam3.video.questions import Pixels, Question, frames_of
from harness.models.sam3.video.source import RecordedStep
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
class _FrameResults:
    """The tracker's results on a frame, bucket by bucket."""

    logits: list[Floats] = field(default_factory=list)
    object_logits: list[Floats] = field(default_factory=list)
    memories: list[Bits] = field(default_factory=list)
    remembered: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    births: int = 0

    def arrays(self) -> Arrays:
        """Returns the arrays of all buckets, with the names of `harness.models.sam3.video.upstream.PARTS`."""
        return {
            "logits": np.concatenate([np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32), *self.logits]),
            "object_logits": np.concatenate([np.zeros(0, np.float32), *self.object_logits]),
            "memories": np.concatenate([np.zeros((0, 64, 72, 72), np.uint16), *self.memories]),
            "remembered": np.concatenate([np.zeros(0, bool), *self.remembered]),
            "births": np.array([self.births]),
        }


class RecordingTracker(Tracker):
    """The compiled model's tracker, which records its results.

    Attributes:
        frame: The frame that is being processed.
        computed: Results by frame.
    """

    def __init__(self, artifact: LoadedModel) -> None:
        """Takes a loaded model."""
        super().__init__(artifact)
        self.frame = 0
        self.computed: dict[int, _FrameResults] = {}

    def track(self, features: Tensors, attended: AttentionInputs) -> TrackedMasks:
        """Tracks as `Tracker.track` and records mask and object logits."""
        tracked = super().track(features, attended)
        self._results.logits.append(tracked.logits)
        self._results.object_logits.append(tracked.object_logits[:, 0])
        return tracked

    def encode_memory(self, features: Tensors, logits: Floats, object_logits: Floats) -> Bits:
        """Encodes a memory as `Tracker.encode_memory`, and records it with the objects that it has."""
        bits = super().encode_memory(features, logits, object_logits)
        self._results.memories.append(bits)
        self._results.remembered.append(object_logits > 0)
        return bits

    def encode_prompt_memory(self, features: Tensors, logits: Floats, object_logits: Floats) -> Bits:
        """Encodes the memory of new objects as `Tracker.encode_prompt_memory`, and counts the objects."""
        self._results.births += len(logits)
        return super().encode_prompt_memory(features, logits, object_logits)

    @property
    def _results(self) -> _FrameResults:
        return self.computed.setdefault(self.frame, _FrameResults())


def answer_question(model: Sam3, question: Question) -> Arrays:
    """Returns the compiled model's answer to a question.

    Returns:
        Arrays by answer and name, as in `harness.models.sam3.video.source.Answer`, with boxes (x0, y0, x1, y1) in
        pixels; `births` int64 [1] of each frame; and `left` int64 [1], the number of objects in the end.
    """
    frames = frames_of(question)
    tracker = RecordingTracker(model.artifact)
    session = Session(model, tracker, _reporting_frames(frames, tracker))
    height, width = frames[0].shape[:2]
    box = None if question.box is None else np.array(question.box) * (width, height, width, height)
    arrays = _answer_arrays(0, session.add_prompt(question.frame, question.text, box))
    tracker.computed.clear()
    for number, frame in enumerate(session.propagate(), start=1):
        arrays |= _answer_arrays(number, frame)
    for number, index in enumerate(range(question.frame, question.length), start=1):
        computed = tracker.computed.get(index, _FrameResults()).arrays()
        arrays |= {f"{number}/{name}": array for name, array in computed.items()}
    return arrays | {"left": np.array([len(session.objects)])}


def compute_step(model: Sam3, step: RecordedStep, length: int) -> Arrays:
    """Returns the compiled model's outputs from PyTorch's own state, by the names in `STEP`, and `rounded`.

    Args:
        model: The model.
        step: The state.
        length: The number of frames of the video.
    """
    observed = _ObservedMemories(model.artifact)
    tracker = Tracker(observed)
    tracked = tracker.track(step.features, step.bank.read(step.bank.plan(step.frame, num_frames=length)))
    bits = tracker.encode_memory(step.features, step.masks, step.present)
    return {
        "logits": tracked.logits,
        "pointers": tracked.pointers,
        "object_logits": tracked.object_logits,
        "iou": tracked.iou.max(axis=-1),
        "memory": np.concatenate(observed.memories),
        "rounded": bits,
    }


class _ObservedMemories:
    """A loaded model that records encoded memories before they are rounded."""

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


def _reporting_frames(frames: Sequence[Pixels], tracker: RecordingTracker) -> Frames:
    """Returns frames whose reader sets the tracker's frame to the frame that is read, which is processed next."""

    def read_frames() -> Generator[Pixels, None, None]:
        for index, frame in enumerate(frames):
            tracker.frame = index
            yield frame

    return Frames("the video", read_frames, len(frames))


def _answer_arrays(number: int, frame: TrackedFrame) -> Arrays:
    return {f"{number}/{name}": getattr(frame, name) for name in ("ids", "scores", "boxes", "masks")}

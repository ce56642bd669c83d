"""Asks the compiled model about videos as its users do, and records the results of its tracker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from harness.core.program import Array, Arrays
from harness.models.sam3.patches.patch import wrapped
from harness.models.sam3.video import FOLLOWED
from harness.models.sam3.video.questions import (
    Question,
    SessionQuestion,
    frames_of,
    number_frames,
)
from harness.parity.references import add_prefix, select
from harness.runtime.arrays import Floats, Pixels
from harness.runtime.artifact import LoadedModel, Tensors
from harness.runtime.sam3.images import MASK_SIZE
from harness.runtime.sam3.interactive import EncodedObjectPrompt
from harness.runtime.sam3.model import Sam3
from harness.runtime.sam3.video.detector import Detections, Detector, EncodedFrame
from harness.runtime.sam3.video.memory_bank import AttentionInputs, MemoryBank, MemoryEntry, PromptOutput, Retention
from harness.runtime.sam3.video.session import Session, TrackedFrame
from harness.runtime.sam3.video.slots import Placement, Slots
from harness.runtime.sam3.video.tracker import Bits, TrackedMasks, Tracker

Computed = dict[int, Arrays]
"""The results that `RecordingTracker` records, by frame."""


def _no_results() -> Arrays:
    """Returns the results of a frame on which nothing is computed, by name."""
    return {
        **{f"{kind}logits": np.zeros((0, MASK_SIZE, MASK_SIZE), np.float32) for kind in ("", "clicked_", "detected_")},
        **{name: np.zeros(0, np.float32) for name in ("object_logits", "clicked_object_logits", "detected_scores")},
        "memories": np.zeros((0, 64, 72, 72), np.uint16),
        "remembered": np.zeros(0, bool),
        "births": np.zeros(1, np.int64),
    }


class RecordingTracker(Tracker):
    """The compiled model's tracker, which records its results.

    Attributes:
        frame: The frame that is being processed.
        computed: Results by frame, in the order in which they were computed. Of N tracked objects `logits` fp32
            [N, 288, 288], `object_logits` fp32 [N], `memories` and `remembered`, as in `upstream.PARTS`; of clicked
            objects `clicked_logits` and `clicked_object_logits`; of detections `detected_logits` and
            `detected_scores`; and `births` int64 [1], the number of new objects.
    """

    def __init__(self, artifact: LoadedModel) -> None:
        """Takes a loaded model."""
        super().__init__(artifact)
        self.frame = 0
        self.computed: Computed = {}

    def track(self, features: Tensors, attended: AttentionInputs, slots: Slots | None = None) -> TrackedMasks:
        """Tracks as `Tracker.track` and records mask and object logits."""
        tracked = super().track(features, attended, slots)
        self.record(logits=tracked.logits, object_logits=tracked.object_logits[:, 0])
        return tracked

    def decode_prompt(self, features: Tensors, prompt: EncodedObjectPrompt) -> tuple[PromptOutput, Floats]:
        """Predicts an object as `Tracker.decode_prompt` and records its mask and object logits."""
        output, logits = super().decode_prompt(features, prompt)
        self.record(clicked_logits=logits[None], clicked_object_logits=output.object_logits[:, 0])
        return output, logits

    def encode_memory(
        self, features: Tensors, logits: Floats, object_logits: Floats, placement: Placement | None = None
    ) -> Bits:
        """Encodes a memory as `Tracker.encode_memory`, and records it with the objects that it has."""
        bits = super().encode_memory(features, logits, object_logits, placement)
        self.record(memories=bits, remembered=object_logits > 0)
        return bits

    def encode_prompt_memory(
        self, features: Tensors, logits: Floats, object_logits: Floats, placement: Placement | None = None
    ) -> Bits:
        """Encodes the memory of new objects as `Tracker.encode_prompt_memory`, and counts the objects."""
        self.record()["births"] += len(logits)
        return super().encode_prompt_memory(features, logits, object_logits, placement)

    def record(self, **arrays: Array) -> Arrays:
        """Appends arrays to those of the frame, and returns all of them."""
        results = self.computed.setdefault(self.frame, _no_results())
        results |= {name: np.concatenate([results[name], array]) for name, array in arrays.items()}
        return results


@contextmanager
def _recorded_session(model: Sam3, frames: Sequence[Pixels], *, keep: bool) -> Iterator[tuple[Session, Computed]]:
    """Starts a session, and records what it computes by frame for the duration of the context."""
    tracker = RecordingTracker(model.artifact)
    session = Session(model, tracker, list(frames), keep=keep)

    def encode_frame(original: Callable[[int], EncodedFrame], index: int) -> EncodedFrame:
        tracker.frame = index
        return original(index)

    def detect(original: Callable[..., tuple[Detections | None, ...]], *arguments: Any) -> Any:
        results = original(*arguments)
        for detections in filter(None, results):
            tracker.record(detected_logits=detections.logits, detected_scores=detections.scores)
        return results

    with wrapped(session.processor, "encode_frame", encode_frame), wrapped(Detector, "detect", detect):
        yield session, tracker.computed


def answer_question(model: Sam3, question: Question) -> Arrays:
    """Returns the compiled model's answer to a question.

    Returns:
        `frames/0/…` answers the prompt, `frames/1/…` is the prompt's frame, and so on, with the arrays of
        `frame_arrays` and of `RecordingTracker.computed`; and `frames/left` int64 [1], the number of objects in the
        end.
    """
    frames = frames_of(question)
    height, width = frames[0].shape[:2]
    box = None if question.box is None else np.array(question.box) * (width, height, width, height)
    with _recorded_session(model, frames, keep=False) as (session, computed):
        arrays = add_prefix("0", frame_arrays(session.add_prompt(question.frame, question.text, box)))
        arrays |= add_prefix("0", computed.pop(question.frame, _no_results()))
        for number, frame in enumerate(session.propagate(), start=1):
            arrays |= add_prefix(str(number), frame_arrays(frame))
    for number, index in enumerate(range(question.frame, question.length), start=1):
        arrays |= add_prefix(str(number), computed.get(index, _no_results()))
    arrays["left"] = np.array([len(session.objects)])
    return add_prefix("frames", arrays)


def computed_frames(question: Question | SessionQuestion, answer: Arrays) -> Computed:
    """Returns the arrays `FOLLOWED` by frame, from the compiled model's answer to a question."""
    if isinstance(question, SessionQuestion):
        frames = {frame: select(answer, f"computed/{frame}") for frame in range(question.length)}
        return {frame: arrays for frame, arrays in frames.items() if arrays}
    numbers = {frame: [number] for number, frame in enumerate(range(question.frame, question.length), start=1)}
    numbers[question.frame] = [0, 1]  # the prompt's frame is processed twice
    return {
        frame: {name: np.concatenate([answer[f"frames/{number}/{name}"] for number in group]) for name in FOLLOWED}
        for frame, group in numbers.items()
    }


def compute_step(model: Sam3, state: Arrays, length: int) -> Arrays:
    """Returns the compiled model's outputs from PyTorch's own state, by the names in `STEP`, and `rounded`.

    Args:
        model: The model.
        state: The state of a `harness.models.sam3.video.upstream.Step`.
        length: The number of frames of the video.
    """
    artifact, tracker = model.artifact, Tracker(model.artifact)
    memories: list[Floats] = []

    def call(original: Callable[..., Tensors], entry: str, **inputs: Any) -> Tensors:
        outputs = original(entry, **inputs)
        if entry == "encode_memory":
            memories.append(artifact.fetch(outputs["memory"]))  # before it is rounded
        return outputs

    features = {name: state[name] for name in ("high_res_0", "high_res_1", "features")}
    bank = _memory_bank(state)
    with wrapped(artifact, "call", call):
        tracked = tracker.track(features, bank.read(bank.plan(int(state["frame"][0]), num_frames=length)))
        bits = tracker.encode_memory(features, state["masks"], state["present"])
    return {
        "logits": tracked.logits,
        "pointers": tracked.pointers,
        "object_logits": tracked.object_logits,
        "iou": tracked.iou.max(axis=-1),
        "memory": np.concatenate(memories),
        "rounded": bits,
    }


def _memory_bank(state: Arrays) -> MemoryBank:
    """Returns upstream's memories of a bucket."""
    count = len(state["present"])
    names = ("frames", "memories", "pointers", "object_logits", "scores")
    entries = {
        int(frame): MemoryEntry(
            memory, pointer, logits, np.zeros(count, np.float32), None if np.isnan(score) else score
        )
        for frame, memory, pointer, logits, score in zip(*(state[name] for name in names), strict=True)
    }
    conditioning = tuple(map(int, state["conditioning"]))
    return MemoryBank(
        tuple(range(count)),
        Retention.EVERYTHING,
        conditioning={frame: entries[frame] for frame in conditioning},
        tracked={frame: entry for frame, entry in sorted(entries.items()) if frame not in conditioning},
        first_frame=min(conditioning),
    )


def answer_session(model: Sam3, question: SessionQuestion) -> Arrays:
    """Returns the compiled model's answers to the requests of a session.

    Returns:
        The arrays of `frame_arrays`, numbered, `frames/0/…`; and by frame those of `FOLLOWED`, `computed/0/…`.
    """
    frames = frames_of(question)
    with _recorded_session(model, frames, keep=True) as (session, computed):
        answers = number_frames(
            (position, frame_arrays(frame)) for position, frame in question.send(session, frames[0].shape[:2])
        )
    arrays = add_prefix("frames", answers)
    for frame, results in computed.items():
        arrays |= add_prefix(f"computed/{frame}", {name: results[name] for name in FOLLOWED})
    return arrays


def frame_arrays(frame: TrackedFrame) -> Arrays:
    """Returns the judged arrays of a frame: `index` int64 [1], `ids`, `scores`, `boxes` (x0, y0, x1, y1), `masks`."""
    names = ("ids", "scores", "boxes", "masks")
    return {"index": np.array([frame.index]), **{name: getattr(frame, name) for name in names}}

"""Tracks drawn births and removals with this project's buckets of slots; networks are replaced by numbers.

A pointer is 1,000 times its frame plus its object, and a half more if a mask made it; a memory is its frame. What a
frame reads thus tells which frames and objects it is of.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from harness.runtime.arrays import Floats
from harness.runtime.sam3.video import masklets
from harness.runtime.sam3.video.detector import Detections, EncodedFrame
from harness.runtime.sam3.video.memory_bank import AttentionInputs, PromptOutput, Retention
from harness.runtime.sam3.video.multiplex import MultiplexTracker
from harness.runtime.sam3.video.rules import Rules
from harness.runtime.sam3.video.slots import Placement, Slots
from harness.runtime.sam3.video.tracker import Bits, TrackedMasks, from_bfloat16, to_bfloat16

FRAMES = 40
COUNTS = (1, 2, 15, 16, 17, 32)
"""Objects of the first frame."""
SIZE, SIDE = 128, 8
"""Height and width of masks; and of an object's, which is a square of its own."""
COLUMNS = SIZE // SIDE
RECONDITIONED = 16
RULES = Rules(hotstart_frames=0, hotstart_unmatched=0, hotstart_duplicates=0, recondition_every=RECONDITIONED)

State = dict[str, Any]
"""Objects that share conditioning frames, on a frame: `ids`, `places`; `given`, those with a mask on it; and if they
were tracked, what they read: `memories` as (frame, rank), `pointers` [P, buckets, 16], and `times`."""


@dataclass(frozen=True)
class Script:
    """What happens on each frame: how many objects are born, and which are then removed."""

    births: tuple[int, ...]
    removed: tuple[tuple[int, ...], ...]


def drawn_script(seed: int, count: int) -> Script:
    """Draws a script that begins with so many objects."""
    random = Random(f"{seed} {count}")
    alive, born, births, removed = list[int](), 0, list[int](), list[tuple[int, ...]]()
    for frame in range(FRAMES):
        births.append(count if frame == 0 else random.choice([0, 0, 0, 0, 1, 1, 2, 5]))
        alive += range(born, born := born + births[-1])
        leaving = random.sample(alive, min(len(alive) - 1, random.choice([0, 0, 0, 1, 2, 6])))
        removed.append(tuple(sorted(leaving)))
        alive = [each for each in alive if each not in leaving]
    return Script(tuple(births), tuple(removed))


def square(object_id: int) -> Floats:
    """Returns the logits of an object's mask."""
    logits = np.full((SIZE, SIZE), -10, np.float32)
    row, column = divmod(object_id, COLUMNS)
    logits[row * SIDE : (row + 1) * SIDE, column * SIDE : (column + 1) * SIDE] = 10
    return logits


class ScriptedTracker(MultiplexTracker):
    """A tracker without a model, which records what it is asked."""

    def __init__(self) -> None:
        self.masklets: masklets.Masklets | None = None
        self.frame = 0
        self.states: dict[tuple[int, ...], State] = {}

    def _ids(self, slots: Slots) -> tuple[int, ...]:
        assert self.masklets is not None
        return next(each.bank.objects for each in self.masklets.buckets.values() if each.bank.slots is slots)

    def remembered_features(self, features: Any) -> Floats:
        return np.full((1, 1, 1, 1), self.frame, np.float32)

    def track(self, features: Any, attended: AttentionInputs, slots: Slots | None = None) -> TrackedMasks:
        assert slots is not None
        assert attended.features is not None
        ids = self._ids(slots)
        memories = from_bfloat16(attended.memories)
        assert (memories[:, :, 0, 0, 0] == attended.features[:, :1, 0, 0]).all()
        self.states[ids] = {
            "memories": np.stack((memories[:, 0, 0, 0, 0], attended.ranks), axis=1).astype(int).tolist(),
            "pointers": attended.pointers[..., 0].tolist(),
            "times": attended.times.tolist(),
        }
        count = len(ids)
        return TrackedMasks(
            logits=np.stack([square(each) for each in ids]),
            pointers=np.array([[1000 * self.frame + each] for each in ids], np.float32),
            object_logits=np.full((count, 1), 10, np.float32),
            iou=np.ones((count, 3), np.float32),
        )

    def use_mask(self, features: Any, mask: Floats) -> PromptOutput:
        row, column = (int(each[0]) // SIDE for each in np.nonzero(mask))
        pointer = np.full((1, 1), 1000 * self.frame + COLUMNS * row + column + 0.5, np.float32)
        return PromptOutput(pointer, np.full((1, 1), 10, np.float32), np.ones((1, 1), np.float32))

    def encode_predicted_memory(
        self, features: Any, logits: Floats, object_logits: Floats, placement: Placement | None = None
    ) -> Bits:
        assert placement is not None
        slots = placement.slots
        assert slots.mux(logits).shape[:2] == (len(slots.taken), 16)
        return to_bfloat16(np.full((len(slots.taken), 1, 1, 1), self.frame, np.float32))

    encode_memory = encode_predicted_memory


@dataclass
class Tracked:
    """Objects that this project tracks by a script."""

    tracker: ScriptedTracker = field(default_factory=ScriptedTracker)
    retention: Retention = Retention.FORWARD

    def __post_init__(self) -> None:
        model: Any = SimpleNamespace(resize_masks=lambda logits, _, pixels: logits[0] > 0)
        self.masklets = masklets.Masklets(model, self.tracker, RULES, self.retention, None)
        self.tracker.masklets = self.masklets

    def step(self, frame: int, births: int, removed: Sequence[int]) -> list[State]:
        """Tracks a frame; returns the states after it, in the order in which they were made."""
        state = self.masklets.state
        self.tracker.frame, self.tracker.states = frame, {}
        shown = [*state.ids, *range(state.next_id, state.next_id + births)]
        logits = np.array([square(each) for each in shown], np.float32).reshape(-1, SIZE, SIZE)
        detections = Detections(np.arange(len(shown)), np.full(len(shown), 0.9, np.float32), logits > 0, logits)
        image: Any = SimpleNamespace(size=(SIZE, SIZE), pixels=None)
        sizes = dict.fromkeys(("MASK_SIZE", "INPUT_MASK_SIZE", "PROMPT_MASK_SIZE"), SIZE)
        before = {number: each.bank.objects for number, each in self.masklets.buckets.items()}
        with patch.multiple(masklets, **sizes):
            self.masklets.process(EncodedFrame(frame, image, {}), detections, state.next_id, FRAMES, reverse=False)
        given = {
            number: sorted(entry.given)
            for number, each in self.masklets.buckets.items()
            if (entry := each.bank.entry(frame)) is not None
        }
        for each in removed:
            self.masklets.remove(each)
        states = []
        for number, bucket in self.masklets.buckets.items():
            assert bucket.bank.slots is not None
            read = self.tracker.states.get(before.get(number, ()), {})
            places = list(bucket.bank.slots.places)
            states.append({"ids": list(bucket.bank.objects), "places": places, "given": given[number], **read})
        return states


def digest(states: list[State]) -> str:
    """Returns the beginning of the SHA-256 of states."""
    return hashlib.sha256(json.dumps(states, sort_keys=True).encode()).hexdigest()[:16]

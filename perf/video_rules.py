"""What a frame costs besides networks: the planner and the image functions for many objects in a large video.

    python -m perf.video_rules --model dist/sam3-video --objects 10 --rounds 20

Detections and tracked masks are ellipses that move; memories and networks are left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.runtime import Sam3
from harness.runtime.sam3.resizing import resize
from harness.runtime.sam3.video.detector import select_detections
from harness.runtime.sam3.video.masks import (
    SUPPRESSED_LOGIT,
    object_logits,
    suppress_shrunken,
    without_holes_and_sprinkles,
)
from harness.runtime.sam3.video.outputs import frame_output, sigmoid, visible_objects
from harness.runtime.sam3.video.planner import plan_frame
from harness.runtime.sam3.video.rules import DISAMBIGUATED, VideoState
from harness.runtime.sam3.video.tracker import INPUT_MASK_SIZE

Floats = npt.NDArray[np.float32]

SIZE = 1920, 1080
"""Width and height of the video."""
MASK = 288
QUERIES = 200
"""Queries of the detector; as many of them as there are objects count."""


@dataclass(frozen=True)
class Costs:
    """Seconds of each round, by step."""

    by_step: dict[str, list[float]]

    @property
    def milliseconds(self) -> float:
        """The median of all steps of a round together."""
        return statistics.median(map(sum, zip(*self.by_step.values(), strict=True))) * 1e3


def measured(model: Sam3, objects: int = 10, rounds: int = 10) -> Costs:
    """Processes a frame of a video with so many objects, round after round; the first two are not counted.

    Args:
        model: A model, whose `resize_masks` is used as a session uses it.
        objects: How many.
        rounds: How many rounds are counted.
    """
    seconds: dict[str, list[float]] = {}
    state = VideoState()
    for number in range(rounds + 2):
        state, found = _frame(model, state, objects, number)
        if number > 1:
            for step, taken in found.items():
                seconds.setdefault(step, []).append(taken)
    return Costs(seconds)


def _frame(model: Sam3, state: VideoState, objects: int, number: int) -> tuple[VideoState, dict[str, float]]:
    width, height = SIZE
    pixels = np.zeros((height, width, 3), np.uint8)
    ellipses = _ellipses(objects, number)
    found, scores = np.full((QUERIES, MASK, MASK), -1, np.float32), np.zeros(QUERIES, np.float32)
    found[:objects], scores[:objects] = ellipses, 0.9
    logits = ellipses if state.objects else ellipses[:0]
    present = np.full(len(logits), 5, np.float32)
    before = state
    clock = _Clock()
    detections = select_detections(scores, found, DISAMBIGUATED)
    clock.note("detections that count")
    filled = without_holes_and_sprinkles(logits)
    clock.note("holes and sprinkles")
    state, plan = plan_frame(before, number, filled > 0, present, detections)
    filled[plan.suppressed] = SUPPRESSED_LOGIT
    clock.note("planner")
    enlarged = suppress_shrunken(resize(filled, INPUT_MASK_SIZE, INPUT_MASK_SIZE)) if len(filled) else filled
    object_logits(enlarged)
    clock.note("masks for memories")
    tracked = _at_size(model, filled, pixels)
    new = _at_size(model, found[detections.queries[list(plan.births.values())]], pixels)
    clock.note("masks in the size of the video")
    probabilities = [*sigmoid(present), *(state.scores[object_id] for object_id in plan.births)]
    shown = visible_objects((*before.ids, *plan.births), (*tracked, *new), probabilities)
    bits = {each: np.packbits(one.mask) for each, one in shown.items()}
    clock.note("masks that are held back")
    for packed in bits.values():
        np.unpackbits(packed, count=height * width)
    frame_output(shown, state.scores, SIZE)
    clock.note("output")
    return state, clock.seconds


def _at_size(model: Sam3, logits: Floats, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    return model.resize_masks(logits[None], np.arange(len(logits)), pixels)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def note(self, step: str) -> None:
        now = time.perf_counter()
        self.seconds[step], self._last = now - self._last, now


def _ellipses(objects: int, number: int) -> Floats:
    """Logits [objects, 288, 288], above zero in ellipses that stand in a row and move a little."""
    y, x = np.mgrid[:MASK, :MASK].astype(np.float32)
    spread = np.random.default_rng(number).normal(scale=0.02, size=(objects, MASK, MASK)).astype(np.float32)
    columns = (np.arange(objects, dtype=np.float32) + 0.5) * MASK / objects + number % 3
    near = 1 - np.hypot((x - columns[:, None, None]) / (MASK / objects / 2.4), (y - MASK / 2) / (MASK / 3))
    return np.asarray(near + spread, np.float32)


def main() -> None:
    """Prints the median of each step."""
    parser = argparse.ArgumentParser(description="The planner and the image functions of a frame, without networks.")
    parser.add_argument("--model", type=Path, required=True, help="a folder of `sam3-tvm compile --video`")
    parser.add_argument("--objects", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=10)
    given: Any = parser.parse_args()
    costs = measured(Sam3.load(given.model), given.objects, given.rounds)
    for step, seconds in costs.by_step.items():
        print(f"{statistics.median(seconds) * 1e3:8.1f} ms  {step}")
    print(f"{costs.milliseconds:8.1f} ms  together, {given.objects} objects, {SIZE[0]} x {SIZE[1]}")


if __name__ == "__main__":
    main()

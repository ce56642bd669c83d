"""Scripts videos of 12 x 12 pixels without a model: the answers of detector and tracker come from a seed.

Masks are runs of pixels that begin where one of four things begins, so that IoU is a ratio of two lengths. Lengths,
scores and logits lie at the thresholds and right beside them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

SIZE = 12
QUERIES = 6
THINGS, LONGEST = 4, 30
LENGTHS = np.array([1, 2, 3, 5, 7, 8, 9, 10, 11, 13, 14, 15, 16, 17, 18, 20, 30])
"""Ratios of two of them are 0.1, 0.3, 0.5, 0.7 and 0.8, and others close by."""
GHOSTS = np.array([20, 24, 17, 14])
INSIDE = np.float32([0.5, 1, 2, 4])
OUTSIDE = np.float32([-4, -1, -0.5, 0])
NEAR_PRESENT = [np.nextafter(np.float32(0.8), np.float32(side)) for side in (0, 1)]
OBJECT_LOGITS = np.float32([-10, -1, 0, 0.8, *NEAR_PRESENT, 2, 5, 30])


@cache
def near_ties(probability: float) -> tuple[float, ...]:
    """Logits whose sigmoid, as PyTorch rounds it, is the probability in fp32 or the closest beside it."""
    target = float(np.float32(probability))
    logit = np.log(probability / (1 - probability))
    step = max(float(np.spacing(np.float32(logit))), 1e-8)
    rounded: dict[float, float] = {}
    for offset in range(-60, 61):
        candidate = float(np.float32(logit + offset * step))
        rounded.setdefault(torch.full((1, QUERIES, 1), candidate).sigmoid()[0, 0, 0].item(), candidate)
    below, above = (max(each for each in rounded if each < target), min(each for each in rounded if each > target))
    return tuple(rounded[each] for each in (below, target, above))


@cache
def score_logits(thresholds: tuple[float, ...]) -> np.ndarray:
    likely = (3.0, 1.2, 0.9, 0.3, -1.0)
    return np.float32([*(logit for threshold in thresholds for logit in near_ties(threshold)), *likely])


def pick(random: np.random.Generator, values: np.ndarray, size: int | None = None) -> Any:
    """Chooses like `random.choice`, but faster."""
    return values[random.integers(len(values), size=size)]


class Script:
    """The answers of detector and tracker in one video.

    An object follows the thing of its number; some, by their number, have a mask elsewhere (ghosts), follow the next
    thing (twins), are often empty or do anything.
    """

    thresholds: tuple[float, ...] = (0.5, 0.7, 0.8)

    def __init__(self, seed: int) -> None:
        self.seed, self.size = seed, (SIZE, SIZE)
        random = np.random.default_rng([seed, 0])
        self.frames = int(random.integers(1, 34))
        self.busy = random.choice([0.3, 0.8, 0.95])
        self.steady = random.choice([0.3, 0.7, 0.95])
        self.modes = random.choice(5, size=64, p=random.dirichlet([2, 1.5, 1.5, 1, 1]))
        self.lengths = random.choice([10, 20, 30], size=THINGS)
        self._detections: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._tracked: dict[tuple[int, int], tuple[np.ndarray, np.float32]] = {}

    def detections(self, frame: int) -> tuple[np.ndarray, np.ndarray]:
        """Logits fp32 [Q] and mask logits fp32 [Q, H, W]."""
        if frame not in self._detections:
            random = np.random.default_rng([self.seed, 1, frame])
            logits = np.full(QUERIES, -2, np.float32)
            masks = np.empty((QUERIES, SIZE, SIZE), np.float32)
            for query in range(QUERIES):
                thing = query if query < THINGS else int(random.integers(THINGS))
                masks[query] = self._mask(random, thing, self._length(random, thing))
                if random.random() < (self.busy if query < THINGS else 0.3):
                    logits[query] = (
                        3 + random.random() if random.random() < 0.5 else pick(random, score_logits(self.thresholds))
                    )
            self._detections[frame] = logits, masks
        return self._detections[frame]

    def tracked(self, frame: int, object_id: int) -> tuple[np.ndarray, np.float32]:
        """Mask logits fp32 [H, W] and object logit."""
        if (frame, object_id) not in self._tracked:
            random = np.random.default_rng([self.seed, 2, frame, object_id])
            faithful, ghost, twin, fading, _ = range(5)
            mode = self.modes[object_id % len(self.modes)]
            thing, length = object_id % THINGS, 0
            if mode == ghost and random.random() < self.steady:
                thing = THINGS
                length = int(pick(random, GHOSTS))
            elif mode == fading and random.random() < 0.5:
                length = 0
            else:
                if mode == twin:
                    thing = (object_id + 1) % THINGS
                elif mode != faithful:
                    thing = int(random.integers(THINGS))
                length = self._length(random, thing)
            self._tracked[frame, object_id] = self._mask(random, thing, length), pick(random, OBJECT_LOGITS)
        return self._tracked[frame, object_id]

    def _length(self, random: np.random.Generator, thing: int) -> int:
        return int(self.lengths[thing] if random.random() < self.steady else pick(random, LENGTHS))

    def _mask(self, random: np.random.Generator, thing: int, length: int) -> np.ndarray:
        pixels = pick(random, OUTSIDE, SIZE * SIZE)
        start = thing * LONGEST
        pixels[start : start + length] = pick(random, INSIDE, length)
        return pixels.reshape(SIZE, SIZE)

"""Plans scripted videos by SAM 3.1's rules, frame by frame, and says what was decided as plain data."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import numpy as np
import torch

from conformance.support.scripted_video import INSIDE, LONGEST, OUTSIDE, SIZE, Script, pick
from harness.runtime.sam3.video.detector import select_detections
from harness.runtime.sam3.video.masks import SUPPRESSED_LOGIT, corrected_logits
from harness.runtime.sam3.video.planner import plan_frame
from harness.runtime.sam3.video.rules import MULTIPLEX, VideoState

SESSIONS = 150
MOST_OBJECTS = 16
"""Upstream's limit, to which its arrays are padded; the scripts' objects are fewer."""


class MultiplexScript(Script):
    """A script whose masks begin at other pixels of a thing, so that one is rarely part of another; with boxes."""

    thresholds = (0.4, 0.65, 0.8)

    def _mask(self, random: np.random.Generator, thing: int, length: int) -> np.ndarray:
        pixels = pick(random, OUTSIDE, SIZE * SIZE)
        start = thing * LONGEST + int(pick(random, np.array([0, 0, 0, 2, 5, 10])))
        pixels[start : start + length] = pick(random, INSIDE, len(pixels[start : start + length]))
        return pixels.reshape(SIZE, SIZE)

    def boxes(self, frame: int) -> np.ndarray:
        """(x0, y0, x1, y1) of the detections, fp32 [Q, 4], some with centers at the border or right beside it."""
        random = np.random.default_rng([self.seed, 3, frame])
        centers = pick(random, np.float32([0.01, 0.024, 0.025, 0.026, 0.3, 0.5, 0.5, 0.7, 0.974, 0.975, 0.976]), (12,))
        return np.concatenate([centers.reshape(-1, 2) - 0.25, centers.reshape(-1, 2) + 0.25], axis=1)


class PlannedVideo:
    """A video of one text that is propagated from its first frame on, or backwards from its last one."""

    def __init__(self, script: MultiplexScript) -> None:
        self.script = script
        self.state = VideoState()

    def step(self, frame: int, reverse: bool) -> dict[str, Any]:
        """Plans a frame; returns the decisions and what is remembered."""
        script, before = self.script, self.state
        logits, masks = script.detections(frame)
        scores = torch.from_numpy(logits).sigmoid().numpy()
        detections = select_detections(scores, masks, MULTIPLEX, script.boxes(frame))
        queries = detections.queries.tolist()
        said = [script.tracked(frame, each) for each in before.ids]
        tracked = np.array([mask for mask, _ in said], np.float32).reshape(-1, SIZE, SIZE)
        present = np.array([logit for _, logit in said], np.float32)
        self.state, plan = plan_frame(before, frame, tracked > 0, present, detections, rules=MULTIPLEX, reverse=reverse)
        for object_id, detection in plan.reconditionings.items():
            row = before.ids.index(object_id)
            tracked[row] = corrected_logits(tracked[row], detections.logits[detection])
        tracked[plan.suppressed] = SUPPRESSED_LOGIT
        return {
            "births": [[object_id, queries[detection]] for object_id, detection in plan.births.items()],
            "unmatched": list(plan.association.unmatched),
            "matches": {queries[d]: list(ids) for d, ids in enumerate(plan.association.matches) if ids},
            "confident": sorted([each, queries[d]] for each, d in plan.association.confident.items()),
            "reconditioned": sorted(plan.reconditionings),
            "removed": sorted(plan.removed),
            "masks": tracked.ravel().tolist(),
            "ids": list(self.state.ids),
            "first_frames": [item.first_frame for item in self.state.objects],
            "times_unmatched": [item.unmatched for item in self.state.objects],
            "duplicates": sorted(
                [*pair, count] for pair, count in self.state.duplicates.items() if {*pair} <= {*self.state.ids}
            ),
            "last_occluded": [-1 if item.last_occluded is None else item.last_occluded for item in self.state.objects],
            "scores": [round(score, 6) for score in self.state.scores.values()],
        }


def order(script: MultiplexScript) -> tuple[range, bool]:
    """Returns the frames of a session in their order, and whether they go backwards."""
    reverse = script.seed % 4 == 3
    return range(script.frames)[:: -1 if reverse else 1], reverse


def digest(facts: dict[str, Any]) -> str:
    """Returns a short digest of what was decided on a frame."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]


def occurrences(facts: dict[str, Any]) -> Counter[str]:
    """Counts what happened on a frame."""
    happened: Counter[str] = Counter({name: bool(facts[name]) for name in ("births", "unmatched", "removed")})
    happened.update({name: bool(facts[name]) for name in ("confident", "reconditioned", "duplicates")})
    happened["suppressed"] = -10.0 in facts["masks"]
    return happened

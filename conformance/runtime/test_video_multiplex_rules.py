"""SAM 3.1's rules for detections and objects, against decisions of upstream's own planner.

`python -m conformance.support.multiplex_rules FOLDER` writes the decisions again.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.support import multiplex_planned
from conformance.support.multiplex_planned import SESSIONS, MultiplexScript, PlannedVideo, digest, occurrences, order
from harness.core.settings import REPOSITORY
from harness.runtime.sam3.video.detector import Detections, EncodedFrame, select_detections
from harness.runtime.sam3.video.masklets import Masklets
from harness.runtime.sam3.video.masks import SUPPRESSED_LOGIT, without_holes_and_sprinkles
from harness.runtime.sam3.video.memory_bank import Retention
from harness.runtime.sam3.video.rules import MULTIPLEX, TrackedObject, VideoState

RECORDED = [line.split() for line in json.loads((REPOSITORY / "fixtures" / "sam31_rules.json").read_text())]


def test_every_frame_is_decided_as_upstream_decides_it() -> None:
    assert len(RECORDED) == SESSIONS
    happened: Counter[str] = Counter()
    for seed, expected in enumerate(RECORDED):
        script = MultiplexScript(seed)
        video = PlannedVideo(script)
        frames, reverse = order(script)
        for frame, recorded in zip(frames, expected, strict=True):
            facts = video.step(frame, reverse)
            assert digest(facts) == recorded, f"seed {seed}, frame {frame}"
            happened.update(occurrences(facts))
    assert not [name for name, times in happened.items() if times < 5], happened


@pytest.mark.parametrize(
    "change",
    [
        {"multiplex": False},
        {"border": 0.0},
        {"confident_iou": 0.8},
        {"present_logit": 0.8},
        {"new_score": 0.7},
        {"detection_score": 0.5},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_rule_that_differs_from_sam_3_decides_something(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiplex_planned, "MULTIPLEX", replace(MULTIPLEX, **change))
    with pytest.raises(AssertionError, match="seed"):
        test_every_frame_is_decided_as_upstream_decides_it()


def test_a_small_detection_on_a_large_one_is_removed() -> None:
    """Its IoU is small, and it is a part of the other."""
    logits = np.full((2, 20, 20), SUPPRESSED_LOGIT)
    logits[0, :18], logits[1, :2, :2] = 1, 1
    scores = np.float32([0.9, 0.8])
    assert select_detections(scores, logits, MULTIPLEX).queries.tolist() == [0]
    assert select_detections(scores, logits, replace(MULTIPLEX, multiplex=False)).queries.tolist() == [0, 1]


def test_a_corrected_object_is_shown_and_remembered_as_its_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    tracked, detected = np.full((2, 1, 20, 20), -3, np.float32)
    tracked[0, :10], detected[0, :12, 5:] = 2, 4
    masklets = Masklets(nothing, nothing, MULTIPLEX, Retention.FORWARD, "thing")
    masklets.state = VideoState((TrackedObject(0, 0, 0, 0.9),), 1, 1)
    remembered: list[np.ndarray] = []
    methods = {
        "_track": lambda *_: (tracked, np.float32([3])),
        "_recondition": lambda *_: None,
        "_encode_memories": lambda _frame, logits, _ids: remembered.append(logits.copy()),
        "_resize": lambda logits, _frame: logits > 0,
    }
    for name, method in methods.items():
        monkeypatch.setattr(masklets, name, method)
    detections = Detections(np.arange(1), np.float32([0.9]), detected > 0, detected)
    frame = EncodedFrame(MULTIPLEX.recondition_every, nothing, {})
    shown = masklets.process(frame, detections, 1, None, reverse=False)
    assert (shown[0].mask == (detected[0] > 0)).all()
    (logits,) = remembered
    assert (logits[0] == np.where((tracked[0] > 0) == (detected[0] > 0), tracked[0], detected[0])).all()


def test_holes_stay() -> None:
    logits = np.ones((1, 20, 20), np.float32)
    logits[0, 5, 5] = -1
    assert (without_holes_and_sprinkles(logits, MULTIPLEX.largest_filled) == logits).all()

"""Speed and memory of videos: a frame with three objects, the rules of a frame with ten, and a stream without end.

    pytest perf/test_video.py --scale full --benchmark-json=perf.json

Sides of the frame are PyTorch eager (upstream's video model), the model compiled without tuning and, with a tuning
database, the model compiled with it (`perf/answering.py`). The stream is short here; `python -m perf.video_memory` goes
on for thousands of frames.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.models.sam3.deployed.options import WITH_VIDEO
from harness.models.sam3.subjects import VIDEO
from harness.runtime import Sam3
from perf.answering import Questions, Side
from perf.results import UNTUNED
from perf.video_memory import LARGEST_GROWTH, LARGEST_OBJECT, growth, usage
from perf.video_rules import measured
from perf.videos import ENCODE, FRAME, QUESTIONS, Answer
from perf.whole_model import check_masks

BUDGET_SECONDS = 120.0
"""How long the rounds of all sides together may take; at least six run in any case."""
RULES_MILLISECONDS = 150.0
"""Limit of the planner and the image functions of a frame with ten objects at 1920 x 1080."""
FIRST, LAST = 20, 40
"""Frames of the stream whose memory is compared; all that is ever remembered is there at frame 20."""


def check(found: Answer, expected: Answer) -> None:
    """Checks for the same objects, scores within 1e-4 and all but 1 % of the masks' pixels; verify is stricter."""
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=1e-4)
    check_masks(found.masks, expected.masks, most=1e-2)


ASKED = Questions(VIDEO.name, "perf.videos", FRAME, ENCODE, check, WITH_VIDEO)


@pytest.mark.parametrize("question", QUESTIONS)
def test_video(question: str, ask: Callable[..., None]) -> None:
    ask(question, BUDGET_SECONDS)


@pytest.fixture(scope="module")
def model(sides: dict[str, Side]) -> Sam3:
    """The model that was timed, once more in this process."""
    artifact = sides[UNTUNED].artifact
    assert artifact is not None
    return Sam3.load(artifact)


def test_rules_of_a_frame(model: Sam3) -> None:
    assert measured(model).milliseconds < RULES_MILLISECONDS


def test_memory_of_a_stream_does_not_grow(model: Sam3) -> None:
    seen = {}
    for used in usage(model, every=FIRST):
        seen[used.frame] = used
        if used.frame >= LAST:
            break
    assert seen[LAST].objects > 0
    assert seen[LAST].bytes_of_object <= LARGEST_OBJECT
    if seen[LAST].resident is not None:
        assert growth(seen[FIRST], seen[LAST]) <= LARGEST_GROWTH

"""Speed of clicks: a photograph and a click to masks, the next click on it, and a click that refines a mask.

    pytest perf/test_interactive.py --scale full --benchmark-json=perf.json

Sides are PyTorch eager (upstream's `predict_inst`), the model compiled for clicks without tuning and, with a tuning
database, the model compiled with it (`perf/answering.py`). With `--peers`, the peers run the folder's entry points.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from harness.models.sam3.deployed.options import CLICKS_ALONE
from harness.models.sam3.subjects import INTERACTIVE
from perf.answering import Questions
from perf.clicks import ENCODE, PHOTO_AND_CLICK, QUESTIONS, Answer
from perf.whole_model import check_masks

BUDGET_SECONDS = dict(zip(QUESTIONS, (60.0, 30.0, 30.0), strict=True))
"""How long the rounds of all sides together may take; at least six run in any case."""


def check(found: Answer, expected: Answer) -> None:
    """Checks for IoU and logits within 1e-4, and all but one in 100,000 of the masks' pixels; verify is stricter."""
    np.testing.assert_allclose(found.iou, expected.iou, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    check_masks(found.masks, expected.masks, most=1e-5)


ASKED = Questions(INTERACTIVE.name, "perf.clicks", PHOTO_AND_CLICK, ENCODE, check, CLICKS_ALONE)


@pytest.mark.parametrize("question", QUESTIONS)
def test_interactive(question: str, ask: Callable[..., None]) -> None:
    ask(question, BUDGET_SECONDS[question])

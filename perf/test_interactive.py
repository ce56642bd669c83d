"""Speed of clicks: a photograph and a click to masks, the next click on it, and a click that refines a mask.

    pytest perf/test_interactive.py --scale full --benchmark-json=perf.json

Sides are PyTorch eager (upstream's `predict_inst`), the model compiled for clicks without tuning and, with a tuning
database, the model compiled with it (`perf/answering.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from harness.core.case import Case
from harness.models.sam3.deployed.deployable import DEPLOYABLE
from harness.models.sam3.interactive.subject import INTERACTIVE
from harness.models.sam3.interactive.workload import CAPACITY
from perf.answering import Questions, Side, answering_sides, measure, named_case
from perf.clicks import ENCODE, PHOTO_AND_CLICK, QUESTIONS, Answer
from perf.options import Options

BUDGET_SECONDS = dict(zip(QUESTIONS, (60.0, 30.0, 30.0), strict=True))
"""How long the rounds of all sides together may take; at least six run in any case."""


def check(found: Answer, expected: Answer) -> None:
    """Checks for IoU and logits within 1e-4, and all but one in 100,000 of the masks' pixels; verify is stricter."""
    np.testing.assert_allclose(found.iou, expected.iou, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert (found.masks != expected.masks).mean() <= 1e-5


ASKED = Questions("perf.clicks", PHOTO_AND_CLICK, ENCODE, check, CAPACITY, DEPLOYABLE.grounding)


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> Case:
    return named_case(INTERACTIVE.name, request.config)


@pytest.fixture(scope="module")
def sides(whole: Case, options: Options) -> Iterator[dict[str, Side]]:
    with answering_sides(ASKED, whole, options) as found:
        yield found


@pytest.mark.parametrize("question", QUESTIONS)
def test_interactive(
    question: str,
    sides: dict[str, Side],
    whole: Case,
    options: Options,
    benchmark: Any,
    end_to_end_results: list[dict[str, Any]],
) -> None:
    end_to_end_results.append(measure(question, ASKED, sides, whole, options, benchmark, BUDGET_SECONDS[question]))

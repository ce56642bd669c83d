"""Speed of the whole model: a photograph and a text to masks, a second text on it, and one that finds nothing.

    pytest perf/test_end_to_end.py --scale full --benchmark-json=perf.json

Sides are PyTorch eager (upstream's `Sam3Processor`), the model compiled without tuning and, with a tuning database,
the model compiled with it (`perf/answering.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.core.case import Case
from harness.models.sam3.end_to_end.subject import END_TO_END
from perf.answering import Questions, Side, answering_sides, measure, named_case
from perf.options import Options
from perf.whole_model import ENCODE, PHOTO_AND_TEXT, QUESTIONS, check

BUDGET_SECONDS = dict(zip(QUESTIONS, (60.0, 40.0, 30.0), strict=True))
"""How long the rounds of all sides together may take; at least six run in any case."""


ASKED = Questions("perf.whole_model", PHOTO_AND_TEXT, ENCODE, check)


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> Case:
    return named_case(END_TO_END.name, request.config)


@pytest.fixture(scope="module")
def sides(whole: Case, options: Options) -> Iterator[dict[str, Side]]:
    with answering_sides(ASKED, whole, options) as found:
        yield found


@pytest.mark.parametrize("question", QUESTIONS)
def test_end_to_end(
    question: str,
    sides: dict[str, Side],
    whole: Case,
    options: Options,
    benchmark: Any,
    end_to_end_results: list[dict[str, Any]],
) -> None:
    end_to_end_results.append(measure(question, ASKED, sides, whole, options, benchmark, BUDGET_SECONDS[question]))

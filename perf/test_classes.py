"""Speed of ten classes on a photograph that is encoded already: one by one, and all of them at once.

    pytest perf/test_classes.py --scale full --benchmark-json=perf.json

Sides are PyTorch eager (upstream's `Sam3Processor`, and its model on a batch of texts), the model compiled without
tuning and, with a tuning database, the model compiled with it (`perf/answering.py`). What a batch gains is the time of
the one question over that of the other. The first call of a side encodes the photograph, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.core.case import Case
from harness.models.sam3.end_to_end.subject import END_TO_END
from perf.answering import Questions, Side, answering_sides, measure, named_case
from perf.classes import ONE_BY_ONE, QUESTIONS
from perf.options import Options
from perf.whole_model import ENCODE, check

BUDGET_SECONDS = 120.0
"""How long the rounds of all sides together may take; at least six run in any case."""
ASKED = Questions("perf.classes", ONE_BY_ONE, ENCODE, check)


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> Case:
    return named_case(END_TO_END.name, request.config)


@pytest.fixture(scope="module")
def sides(whole: Case, options: Options) -> Iterator[dict[str, Side]]:
    with answering_sides(ASKED, whole, options) as found:
        yield found


@pytest.mark.parametrize("question", QUESTIONS)
def test_classes(
    question: str,
    sides: dict[str, Side],
    whole: Case,
    options: Options,
    benchmark: Any,
    end_to_end_results: list[dict[str, Any]],
) -> None:
    result = measure(question, ASKED, sides, whole, options, benchmark, BUDGET_SECONDS, check=True)
    end_to_end_results.append(result)

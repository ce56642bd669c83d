"""Speed of ten classes on a photograph that is encoded already: one by one, and all of them at once.

    pytest perf/test_classes.py --scale full --benchmark-json=perf.json

Sides are PyTorch eager (upstream's `Sam3Processor`, and its model on a batch of texts), the model compiled without
tuning and, with a tuning database, the model compiled with it (`perf/answering.py`). What a batch gains is the time of
the one question over that of the other. The first call of a side encodes the photograph, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.models.sam3.subjects import END_TO_END
from perf.answering import Questions
from perf.classes import ONE_BY_ONE, QUESTIONS
from perf.whole_model import ENCODE, check

BUDGET_SECONDS = 120.0
"""How long the rounds of all sides together may take; at least six run in any case."""
ASKED = Questions(END_TO_END.name, "perf.classes", ONE_BY_ONE, ENCODE, check)


@pytest.mark.parametrize("question", QUESTIONS)
def test_classes(question: str, ask: Callable[..., None]) -> None:
    ask(question, BUDGET_SECONDS, check=True)

"""Speed of the whole model: a photograph and a text to masks, a second text on it, and one that finds nothing.

    pytest perf/test_end_to_end.py --scale full --benchmark-json=perf.json

Sides are PyTorch eager (upstream's `Sam3Processor`), the model compiled without tuning and, with a tuning database,
the model compiled with it (`perf/answering.py`). With `--peers`, the peers run the folder's entry points.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.models.sam3.subjects import END_TO_END
from perf.answering import Questions
from perf.whole_model import ENCODE, PHOTO_AND_TEXT, QUESTIONS, check

BUDGET_SECONDS = dict(zip(QUESTIONS, (60.0, 40.0, 30.0), strict=True))
"""How long the rounds of all sides together may take; at least six run in any case."""


ASKED = Questions(END_TO_END.name, "perf.whole_model", PHOTO_AND_TEXT, ENCODE, check)


@pytest.mark.parametrize("question", QUESTIONS)
def test_end_to_end(question: str, ask: Callable[..., None]) -> None:
    ask(question, BUDGET_SECONDS[question])

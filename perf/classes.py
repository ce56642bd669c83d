"""The sides of ten classes on one photograph: upstream's processor and compiled folders, one by one and in one batch.

Each side answers the questions of `QUESTIONS` on a photograph that is encoded already. Every call asks for ten texts
that the side has not seen, because the compiled model remembers texts; the first call of a question asks all sides for
the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.case import Case
from harness.core.settings import SEEDED
from perf.processes import Calls, Load
from perf.whole_model import ENCODE, PHOTOGRAPH, Answer

if TYPE_CHECKING:
    from harness.runtime import Sam3

ONE_BY_ONE, BATCHED = QUESTIONS = ("ten classes, one by one", "ten classes in one batch")
"""A call of the model for each text; all texts given to the model at once."""


WORDS = ("cup", "saucer", "spoon", "handle", "foam", "table", "plate", "coffee", "shadow", "wood")


def new_texts(question: str) -> Iterator[tuple[str, ...]]:
    """Yields ten texts for each call of a question, none of which another call of either question asks for."""
    for number in itertools.count(QUESTIONS.index(question), len(QUESTIONS)):
        yield tuple(f"{word} {number}" for word in WORDS)


def joined(answers: Sequence[Answer]) -> Answer:
    """Returns the answers of several texts as one, one text after the other."""
    names = [field.name for field in fields(Answer)]
    return Answer(*(np.concatenate([getattr(answer, name) for answer in answers]) for name in names))


def folder_calls() -> Callable[[Sam3], Calls]:
    """Returns the function that asks a folder: `EncodedImage.segment` of each text, or `EncodedImage.segment_each`."""
    from harness.runtime import Found, Prompt
    from harness.runtime.sam3.images import load_image

    photograph = load_image(PHOTOGRAPH)

    def calls(model: Sam3) -> Calls:
        encoded = cache(lambda: model.set_image(photograph))
        each, all_texts = new_texts(ONE_BY_ONE), new_texts(BATCHED)

        def answer(found: Found) -> Answer:
            return Answer(found.masks, found.boxes, found.scores)

        def one_by_one() -> Answer:
            return joined([answer(encoded().segment(text=text)) for text in next(each)])

        def batched() -> Answer:
            prompts = [Prompt(text) for text in next(all_texts)]
            return joined([answer(found) for found in encoded().segment_each(prompts)])

        return {ENCODE: lambda: encoded() and None, ONE_BY_ONE: one_by_one, BATCHED: batched}

    return calls


@contextmanager
def torch_side(case: Case) -> Iterator[Load]:
    """Runs upstream's processor on each text, or its model on all of them at once."""
    import torch
    from sam3.model.sam3_image_processor import Sam3Processor

    from harness.models.sam3.build import build_case
    from harness.models.sam3.end_to_end.upstream import _ask_batch
    from harness.models.sam3.upstream import upstream
    from harness.runtime.sam3.images import load_image

    photograph = load_image(PHOTOGRAPH)
    with upstream():

        def load() -> Calls:
            model = build_case(case, SEEDED)
            encoded = cache(lambda: Sam3Processor(model, device="cpu").set_image(photograph))
            each, all_texts = new_texts(ONE_BY_ONE), new_texts(BATCHED)

            def asked() -> tuple[Sam3Processor, dict[str, Any]]:
                return Sam3Processor(model, device="cpu"), encoded() | {"backbone_out": {**encoded()["backbone_out"]}}

            def answer(state: dict[str, Any]) -> Answer:
                masks = state["masks"].squeeze(1)
                return Answer(*(found.numpy() for found in (masks, state["boxes"], state["scores"])))

            def one_by_one() -> Answer:
                processor, state = asked()
                return joined([answer(processor.set_text_prompt(text, state)) for text in next(each)])

            @torch.inference_mode()
            def batched() -> Answer:
                processor, state = asked()
                _ask_batch(processor, state, next(all_texts))
                return answer(state)

            return {ENCODE: lambda: encoded() and None, ONE_BY_ONE: one_by_one, BATCHED: batched}

        yield load

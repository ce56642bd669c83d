"""The sides of the whole model: upstream's processor and compiled folders, each in a `perf.processes.BenchmarkProcess`.

Each side answers the questions of `QUESTIONS`. Every call asks for a text that the side has not seen, because the
compiled model remembers texts; the first text is `TEXT`, and all sides must find the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.case import Case
from harness.core.settings import REPOSITORY, SEEDED
from harness.runtime.arrays import Floats, Masks
from harness.runtime.sam3.image_model import THRESHOLD
from perf.processes import Calls, Load

if TYPE_CHECKING:
    from harness.runtime import Sam3

PHOTOGRAPH = REPOSITORY / "fixtures" / "images" / "coffee.png"
TEXT = "cup"
IMPOSSIBLE = 1.0
"""A threshold that no score is above, as if the text were of something that is not in the photograph."""

ENCODE = "encode"
"""Another function of every side: it encodes the photograph that the second text is asked of."""
PHOTO_AND_TEXT, SECOND_TEXT, ABSENT_TEXT = QUESTIONS = ("photo and text", "second text", "absent text")
"""A photograph and a text to masks; another text on a photograph that is encoded already; one that finds nothing."""


@dataclass(frozen=True)
class Answer:
    """What a side found: masks bool [k, h, w], boxes fp32 [k, 4] in pixels, scores fp32 [k]."""

    masks: Masks
    boxes: Floats
    scores: Floats


def check(found: Answer, expected: Answer) -> None:
    """Checks for the same queries, scores within 1e-5, boxes within 0.01 pixel, a millionth of the masks' pixels."""
    assert len(found.scores) == len(expected.scores) > 0, f"{len(found.scores)} objects, not {len(expected.scores)}"
    np.testing.assert_allclose(found.scores, expected.scores, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.boxes, expected.boxes, rtol=0, atol=0.01)
    check_masks(found.masks, expected.masks, most=1e-6)


def check_masks(found: Masks, expected: Masks, most: float) -> None:
    """Checks that at most this share of the pixels of masks differs."""
    different = (found != expected).mean()
    assert different <= most, f"{different:.2g} of the masks' pixels differ"


def folder_calls() -> Callable[[Sam3], Calls]:
    """Returns the function that takes a loaded folder and returns the questions that it answers."""
    from harness.runtime import EncodedImage
    from harness.runtime.sam3.images import load_image

    photograph, texts = load_image(PHOTOGRAPH), new_texts()

    def calls(model: Sam3) -> Calls:
        encoded = cache(lambda: model.set_image(photograph))

        def ask(image: EncodedImage, threshold: float = THRESHOLD) -> Answer:
            found = image.segment(text=next(texts), threshold=threshold)
            return Answer(found.masks, found.boxes, found.scores)

        return {
            PHOTO_AND_TEXT: lambda: ask(model.set_image(photograph)),
            ENCODE: lambda: encoded() and None,
            SECOND_TEXT: lambda: ask(encoded()),
            ABSENT_TEXT: lambda: ask(encoded(), IMPOSSIBLE),
        }

    return calls


@contextmanager
def torch_side(case: Case) -> Iterator[Load]:
    """Runs upstream's processor."""
    from sam3.model.sam3_image_processor import Sam3Processor

    from harness.models.sam3.build import build_case
    from harness.models.sam3.upstream import upstream
    from harness.runtime.sam3.images import load_image

    photograph, texts = load_image(PHOTOGRAPH), new_texts()
    with upstream():

        def load() -> Calls:
            processor = Sam3Processor(build_case(case, SEEDED), device="cpu")
            encoded = cache(lambda: processor.set_image(photograph))

            def ask(image: dict[str, Any], threshold: float = THRESHOLD) -> Answer:
                processor.confidence_threshold = threshold
                state = processor.set_text_prompt(next(texts), image)
                masks = state["masks"].squeeze(1)
                return Answer(*(found.numpy() for found in (masks, state["boxes"], state["scores"])))

            return {
                PHOTO_AND_TEXT: lambda: ask(processor.set_image(photograph)),
                ENCODE: lambda: encoded() and None,
                SECOND_TEXT: lambda: ask(encoded()),
                ABSENT_TEXT: lambda: ask(encoded(), IMPOSSIBLE),
            }

        yield load


def new_texts() -> Iterator[str]:
    """Yields `TEXT`, and then texts that were never asked for."""
    return itertools.chain([TEXT], (f"{TEXT} {number}" for number in itertools.count()))

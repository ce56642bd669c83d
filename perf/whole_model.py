"""The sides of the whole model: upstream's processor, and compiled folders; for `perf.seats.Seat`.

Each is asked the questions of `QUESTIONS`. Every call asks a text that the side has not seen, because the compiled
model remembers texts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from harness.settings import REPOSITORY
from perf.seats import Calls, Load

PHOTOGRAPH = REPOSITORY / "fixtures" / "images" / "coffee.png"
TEXT = "cup"

ANSWER = "answer"
"""What every side can do besides: tell what it finds, to be compared."""
PHOTO_AND_TEXT, SECOND_TEXT = QUESTIONS = ("photo and text", "second text")
"""From a photograph and a text to masks; another text on a photograph that is encoded already."""


@dataclass(frozen=True)
class Answer:
    """What was found: masks bool [k, h, w], boxes fp32 [k, 4] in pixels, scores fp32 [k]."""

    masks: npt.NDArray[np.bool_]
    boxes: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]


@contextmanager
def tvm_side(artifact: Path) -> Iterator[Load]:
    """A compiled folder."""
    from harness.runtime import Sam3
    from harness.runtime.images import load_image
    from harness.runtime.loading import load_runtime

    load_runtime()
    photograph, texts = load_image(PHOTOGRAPH), new_texts()

    def load() -> Calls:
        model = Sam3.load(artifact)
        encoded = cache(lambda: model.set_image(photograph))

        def answer() -> Answer:
            found = model.set_image(photograph).segment(text=TEXT)
            return Answer(found.masks, found.boxes, found.scores)

        return {
            ANSWER: answer,
            PHOTO_AND_TEXT: lambda: _nothing(model.set_image(photograph).segment(text=next(texts))),
            SECOND_TEXT: lambda: _nothing(encoded().segment(text=next(texts))),
        }

    yield load


@contextmanager
def torch_side(scale: str) -> Iterator[Load]:
    """Upstream's processor."""
    from sam3.model.sam3_image_processor import Sam3Processor

    from harness.model.build import build_model
    from harness.model.upstream import upstream
    from harness.runtime.images import load_image

    photograph, texts = load_image(PHOTOGRAPH), new_texts()
    with upstream():

        def load() -> Calls:
            processor = Sam3Processor(build_model(scale), device="cpu")
            encoded = cache(lambda: processor.set_image(photograph))

            def answer() -> Answer:
                state = processor.set_text_prompt(TEXT, processor.set_image(photograph))
                masks = state["masks"].squeeze(1)
                return Answer(*(found.numpy() for found in (masks, state["boxes"], state["scores"])))

            return {
                ANSWER: answer,
                PHOTO_AND_TEXT: lambda: _nothing(
                    processor.set_text_prompt(next(texts), processor.set_image(photograph))
                ),
                SECOND_TEXT: lambda: _nothing(processor.set_text_prompt(next(texts), encoded())),
            }

        yield load


def unchecked_load_seconds(artifact: Path, _enter: Callable[[str], None]) -> float:
    """How long loading takes without checksums; to be called by `harness.worker.run_isolated`."""
    from harness.runtime import Sam3
    from harness.runtime.loading import load_runtime

    load_runtime()
    start = time.perf_counter()
    Sam3.load(artifact, check=False)
    return time.perf_counter() - start


def new_texts() -> Iterator[str]:
    """Texts that were never asked."""
    return (f"{TEXT} {number}" for number in itertools.count())


def _nothing(_result: object) -> None:
    """Results stay in the process that found them."""

"""The sides of clicks: upstream's `predict_inst` and compiled folders, each in a `perf.processes.BenchmarkProcess`.

Each side answers the questions of `QUESTIONS` with three masks of the object at `POINT`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.core.case import Case
from harness.core.settings import REPOSITORY, SEEDED
from perf.processes import Calls, Load

if TYPE_CHECKING:
    from harness.runtime import Sam3

PHOTOGRAPH = REPOSITORY / "fixtures" / "images" / "cat.png"
POINT = (0.46, 0.50)
"""Normalized x and y, those of the question `click` of fixtures/interactive.toml."""

ENCODE = "encode"
"""Another function of every side: it encodes the photograph that the next clicks are on."""
PHOTO_AND_CLICK, NEXT_CLICK, REFINEMENT = QUESTIONS = ("photo and click", "next click", "refinement")
"""A photograph and a click to masks; a click on a photograph that is encoded already; the same that refines a mask."""


@dataclass(frozen=True)
class Answer:
    """What a side predicts: masks bool [3, h, w], IoU fp32 [3], logits fp32 [3, 288, 288]."""

    masks: npt.NDArray[np.bool_]
    iou: npt.NDArray[np.float32]
    logits: npt.NDArray[np.float32]


def folder_calls() -> Callable[[Sam3], Calls]:
    """Returns the function that takes a loaded folder and returns the questions that it answers."""
    from harness.runtime import EncodedImage
    from harness.runtime.sam3.images import load_image

    photograph = load_image(PHOTOGRAPH)
    points = [tuple(np.array(POINT) * photograph.size)]

    def calls(model: Sam3) -> Calls:
        encoded = cache(lambda: model.set_image(photograph))
        clicked = cache(lambda: ask(encoded()).logits[0])

        def ask(image: EncodedImage, mask: Any = None) -> Answer:
            found = image.predict(points=points, mask=mask)
            return Answer(found.masks, found.iou, found.logits)

        return {
            PHOTO_AND_CLICK: lambda: ask(model.set_image(photograph)),
            ENCODE: lambda: encoded() and None,
            NEXT_CLICK: lambda: ask(encoded()),
            REFINEMENT: lambda: ask(encoded(), clicked()),
        }

    return calls


@contextmanager
def torch_side(case: Case) -> Iterator[Load]:
    """Runs upstream's processor and its `predict_inst`."""
    from sam3.model.sam3_image_processor import Sam3Processor

    from harness.models.sam3.build import build_case
    from harness.models.sam3.upstream import upstream
    from harness.runtime.sam3.images import load_image

    photograph = load_image(PHOTOGRAPH)
    points, labels = np.array([POINT]) * photograph.size, np.array([1])
    with upstream():

        def load() -> Calls:
            model = build_case(case, SEEDED, interactive=True)
            processor = Sam3Processor(model, device="cpu")
            encoded = cache(lambda: processor.set_image(photograph))
            clicked = cache(lambda: ask(encoded()).logits[:1])

            def ask(image: dict[str, Any], mask: Any = None) -> Answer:
                masks, iou, logits = model.predict_inst(
                    image, point_coords=points, point_labels=labels, mask_input=mask, multimask_output=True
                )
                return Answer(masks.astype(bool), iou, logits)

            return {
                PHOTO_AND_CLICK: lambda: ask(processor.set_image(photograph)),
                ENCODE: lambda: encoded() and None,
                NEXT_CLICK: lambda: ask(encoded()),
                REFINEMENT: lambda: ask(encoded(), clicked()),
            }

        yield load

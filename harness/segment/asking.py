"""What an image is asked, and what the objects that it answers with are called."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.errors import HarnessError
from harness.runtime import EncodedImage, ObjectPrompt, Prompt
from harness.runtime.sam3.prompts import Coordinates, Labels
from harness.segment.objects import Objects, object_of, objects_of

VISUAL = "object"
"""What objects are called where no text was given."""


def category_of(prompt: Prompt | ObjectPrompt) -> str:
    """What the objects of a prompt are called."""
    return prompt.text if isinstance(prompt, Prompt) and prompt.text is not None else VISUAL


def is_ambiguous(prompt: ObjectPrompt) -> bool:
    """Whether a prompt may mean several things: then the best of three masks is taken. Only one click alone does."""
    return prompt.box is None and prompt.points is not None and len(prompt.points) == 1


def ask(image: EncodedImage, prompt: Prompt | ObjectPrompt, threshold: float) -> Objects:
    """Asks an image one prompt; arguments and errors are those of `ask_all`."""
    (objects,) = ask_all(image, [prompt], threshold)
    return objects


def ask_all(image: EncodedImage, prompts: Sequence[Prompt | ObjectPrompt], threshold: float) -> list[Objects]:
    """Asks an image several prompts; their texts are encoded together.

    Args:
        image: The image.
        prompts: The prompts; of what one for one object gives, the best mask is taken.
        threshold: What scores above it is kept, of what a prompt for all of a kind finds.

    Raises:
        Sam3Error: A prompt makes no sense for this image or this model.
    """
    found = image.segment_each([prompt for prompt in prompts if isinstance(prompt, Prompt)], threshold, has_masks=False)

    def objects(prompt: Prompt | ObjectPrompt) -> Objects:
        if isinstance(prompt, Prompt):
            return objects_of(next(found), category_of(prompt))
        (predicted,) = image.predict_batch([prompt], multimask=is_ambiguous(prompt))
        return object_of(predicted, category_of(prompt))

    return [objects(prompt) for prompt in prompts]


def prompts_of_kinds(
    texts: Sequence[str],
    boxes: Coordinates = None,
    box_labels: Labels = None,
    points: Coordinates = None,
    point_labels: Labels = None,
) -> list[Prompt]:
    """Makes a prompt for each text, which counts once; boxes and points go with the only text, or with none.

    Raises:
        HarnessError: There are several texts, and boxes or points.
    """
    distinct = list(dict.fromkeys(texts))
    has_geometry = any(places is not None and len(places) for places in (boxes, points))
    if len(distinct) > 1 and has_geometry:
        raise HarnessError(
            f"Boxes and points go with one text, and {len(distinct)} were given; give one text, or leave them out."
        )
    first = Prompt(distinct[0] if distinct else None, boxes, box_labels, points, point_labels)
    return [first, *(Prompt(text) for text in distinct[1:])]

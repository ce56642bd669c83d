"""Runs prompts on an image and names the categories of the objects that they find."""

from __future__ import annotations

from collections.abc import Sequence

from harness.app.results.objects import Objects, best_object, encode_objects
from harness.core.errors import HarnessError
from harness.runtime import EncodedImage, ObjectPrompt, Prompt, Sam3
from harness.runtime.sam3.prompts import Coordinates, Labels

DEFAULT_CATEGORY = "object"
"""Category of objects that were found without a text."""


def category_name(prompt: Prompt | ObjectPrompt) -> str:
    """Returns the category of the objects of a prompt."""
    return prompt.text if isinstance(prompt, Prompt) and prompt.text is not None else DEFAULT_CATEGORY


def is_ambiguous(prompt: ObjectPrompt) -> bool:
    """Returns whether a prompt is one click alone, which is ambiguous: then the best of three masks is taken."""
    return prompt.box is None and prompt.points is not None and len(prompt.points) == 1


def check_prompts(model: Sam3, prompts: Sequence[Prompt | ObjectPrompt], size: tuple[int, int]) -> None:
    """Checks prompts before an image is encoded, which takes long.

    Args:
        model: The model.
        prompts: The prompts.
        size: Width and height of the image in pixels.

    Raises:
        ModelError: A prompt is invalid for this image or this model.
    """
    for prompt in prompts:
        if isinstance(prompt, Prompt):
            model.encode_prompt(prompt, size)
        else:
            model.encode_object_prompt(prompt, size)


def run_prompts(image: EncodedImage, prompts: Sequence[Prompt | ObjectPrompt], threshold: float) -> list[Objects]:
    """Runs several prompts on an image; their texts are encoded together.

    Args:
        image: The image.
        prompts: The prompts; of a prompt for one object the best mask is taken.
        threshold: Objects of a prompt for all of a kind score above this.

    Raises:
        ModelError: A prompt is invalid for this image or this model.
    """
    detections = image.segment_each(
        [prompt for prompt in prompts if isinstance(prompt, Prompt)], threshold, has_masks=False
    )

    def objects(prompt: Prompt | ObjectPrompt) -> Objects:
        if isinstance(prompt, Prompt):
            return encode_objects(next(detections), category_name(prompt))
        (prediction,) = image.predict_batch([prompt], multimask=is_ambiguous(prompt))
        return best_object(prediction, category_name(prompt))

    return [objects(prompt) for prompt in prompts]


def prompts_of_kinds(
    texts: Sequence[str],
    boxes: Coordinates = None,
    box_labels: Labels = None,
    points: Coordinates = None,
    point_labels: Labels = None,
) -> list[Prompt]:
    """Makes a prompt for each distinct text; boxes and points belong to the only text, or to a prompt without text.

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

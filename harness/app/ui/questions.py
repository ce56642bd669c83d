"""Defines the fields of a question about an image, as JSON."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel

from harness.app.segment.prompts import prompts_of_kinds
from harness.app.ui.encodings import Logits
from harness.core.errors import HarnessError
from harness.runtime import ObjectPrompt, Prompt
from harness.runtime.sam3.image_model import THRESHOLD


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair is no letter") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]


class ObjectFields(BaseModel):
    """A prompt for one object.

    Attributes:
        points, labels, box: See `harness.runtime.ObjectPrompt`.
    """

    points: list[list[float]] = []
    labels: list[int] | None = None
    box: list[float] | None = None

    def prompt(self, logits: Logits | None = None) -> ObjectPrompt:
        """Returns the prompt, which refines a mask if there are logits."""
        return ObjectPrompt(self.points, self.labels, self.box, logits)


class KindsFields(BaseModel):
    """A prompt for all objects of one or several kinds.

    Attributes:
        texts: Noun phrases; boxes go with at most one.
        boxes, box_labels: See `harness.runtime.Prompt`.
        threshold: Objects score above this.
    """

    texts: list[Text] = []
    boxes: list[list[float]] = []
    box_labels: list[bool] | None = None
    threshold: float = THRESHOLD

    def prompts(self) -> list[Prompt]:
        """Returns a prompt for each distinct text.

        Raises:
            HarnessError: The threshold is no score, or there are several texts and boxes.
        """
        prompts = prompts_of_kinds(self.texts, self.boxes, self.box_labels)
        if not 0 <= self.threshold <= 1:
            raise HarnessError(f"The threshold {self.threshold} is no score; give a number from 0 to 1.")
        return prompts

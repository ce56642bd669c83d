"""Defines the questions to the whole model, which are photographs and prompts, in `fixtures/end_to_end.toml`."""

from __future__ import annotations

from harness.core.settings import FIXTURES
from harness.models.sam3.fixtures import PhotographQuestion

QUESTIONS = FIXTURES / "end_to_end.toml"


class Question(PhotographQuestion, frozen=True):
    """A photograph and a prompt; coordinates are normalized to [0, 1].

    Attributes:
        texts: Noun phrases, one for each answer of a batch; empty for a prompt of boxes and points alone.
        boxes: (center x, center y, width, height) of each box.
        box_labels: Whether each box is positive.
        points: (x, y) of each point.
        point_labels: Whether each point is positive.
    """

    texts: tuple[str, ...] = ()
    boxes: tuple[tuple[float, float, float, float], ...] = ()
    box_labels: tuple[bool, ...] = ()
    points: tuple[tuple[float, float], ...] = ()
    point_labels: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        """Checks that the question asks for something, and that its parts agree.

        Raises:
            ValueError: They do not.
        """
        if (len(self.box_labels), len(self.point_labels)) != (len(self.boxes), len(self.points)):
            raise ValueError(f"question {self.name!r} has another number of labels than of boxes or points")
        geometric = self.boxes or self.points
        if not self.texts and not geometric:
            raise ValueError(f"question {self.name!r} asks for nothing")
        if len(self.texts) > 1 and geometric:
            raise ValueError(f"question {self.name!r} is a batch of texts with boxes or points")

    @property
    def answers(self) -> tuple[str, ...]:
        """Returns the names of the answers: the question's own, or one for each text of a batch."""
        return self.numbered(len(self.texts))

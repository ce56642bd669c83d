"""Defines questions about one object, which are photographs and rounds of prompts, in `fixtures/interactive.toml`."""

from __future__ import annotations

from harness.core.settings import FIXTURES
from harness.models.sam3.fixtures import Fixture, PhotographQuestion

QUESTIONS = FIXTURES / "interactive.toml"


class Round(Fixture, frozen=True):
    """One prompt; every later round adds the best mask of the previous round.

    Attributes:
        points: (x, y) of each point, normalized to [0, 1].
        labels: 1 or 0 for each point.
        box: (x0, y0, x1, y1), normalized to [0, 1].
    """

    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: tuple[float, float, float, float] | None = None


class Question(PhotographQuestion, frozen=True):
    """A photograph and an object in it.

    Attributes:
        rounds: The prompts, in order.
        multimask: Whether every round asks for three masks.
    """

    rounds: tuple[Round, ...]
    multimask: bool = True

    def __post_init__(self) -> None:
        """Checks that the question asks for something, and that every point has a label.

        Raises:
            ValueError: It does not, or one has none.
        """
        if not self.rounds or not (self.rounds[0].points or self.rounds[0].box):
            raise ValueError(f"question {self.name!r} asks for nothing in its first round")
        if any(len(prompt.points) != len(prompt.labels) for prompt in self.rounds):
            raise ValueError(f"a round of question {self.name!r} has another number of labels than of points")

    @property
    def answers(self) -> tuple[str, ...]:
        """Returns the names of the answers, one for each round."""
        return self.numbered(len(self.rounds), "round_")

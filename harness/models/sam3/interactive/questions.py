"""What is asked of one object: photographs and rounds of prompts, as data in `fixtures/interactive.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.settings import REPOSITORY
from harness.models.sam3.questions import check_keys, read_questions

QUESTIONS = REPOSITORY / "fixtures" / "interactive.toml"


@dataclass(frozen=True)
class Round:
    """One prompt; from the second round on, the best mask of the round before goes with it.

    Attributes:
        points: (x, y) each, normalized to [0, 1].
        labels: 1 or 0 for each point.
        box: (x0, y0, x1, y1), normalized to [0, 1].
    """

    points: tuple[tuple[float, float], ...] = ()
    labels: tuple[int, ...] = ()
    box: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class Question:
    """A photograph and an object in it.

    Attributes:
        name: What it is called in reports.
        image: Path of the photograph.
        rounds: The prompts, in order.
        multimask: Whether three masks are asked for in every round.
        float64: Whether the answers are held to float64 too.
    """

    name: str
    image: Path
    rounds: tuple[Round, ...]
    multimask: bool = True
    float64: bool = True

    @property
    def answers(self) -> tuple[str, ...]:
        """Names of the answers, one for each round."""
        if len(self.rounds) == 1:
            return (self.name,)
        return tuple(f"{self.name}/round_{number}" for number in range(1, len(self.rounds) + 1))


def load_questions(path: Path = QUESTIONS, image: Path | None = None) -> tuple[Question, ...]:
    """Reads the questions; those about one photograph follow each other.

    Args:
        path: A TOML file of `[[question]]` tables; images are relative to it.
        image: Another photograph: what is asked of the first one is asked of this, and nothing else.

    Raises:
        HarnessError: The file is missing, a question is incomplete or contradicts itself, or there is none.
    """
    return read_questions(path, _question, image)


def _question(table: dict[str, Any], path: Path) -> Question:
    check_keys(table, Question, f"question {table.get('name')!r}")
    question = Question(
        name=table["name"],
        image=path.parent / table["image"],
        rounds=tuple(_round(given, table["name"]) for given in table["rounds"]),
        multimask=bool(table.get("multimask", True)),
        float64=bool(table.get("float64", True)),
    )
    if not question.rounds or not (question.rounds[0].points or question.rounds[0].box):
        raise ValueError(f"question {question.name!r} asks for nothing in its first round")
    return question


def _round(given: dict[str, Any], name: str) -> Round:
    check_keys(given, Round, f"a round of question {name!r}")
    points = tuple((float(x), float(y)) for x, y in given.get("points", ()))
    labels = tuple(int(label) for label in given.get("labels", ()))
    if len(points) != len(labels):
        raise ValueError(f"a round of question {name!r} has another number of labels than of points")
    box = given.get("box")
    if box is None:
        return Round(points, labels)
    x0, y0, x1, y1 = map(float, box)
    return Round(points, labels, (x0, y0, x1, y1))

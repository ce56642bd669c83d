"""Reads questions about one object, which are photographs and rounds of prompts, from `fixtures/interactive.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.settings import REPOSITORY
from harness.models.sam3.questions import check_keys, read_questions

QUESTIONS = REPOSITORY / "fixtures" / "interactive.toml"


@dataclass(frozen=True)
class Round:
    """One prompt; every later round adds the best mask of the previous round.

    Attributes:
        points: (x, y) of each point, normalized to [0, 1].
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
        name: Name in reports.
        image: Path of the photograph.
        rounds: The prompts, in order.
        multimask: Whether every round asks for three masks.
        float64: Whether the answers are also held to float64.
    """

    name: str
    image: Path
    rounds: tuple[Round, ...]
    multimask: bool = True
    float64: bool = True

    @property
    def answers(self) -> tuple[str, ...]:
        """Returns the names of the answers, one for each round."""
        if len(self.rounds) == 1:
            return (self.name,)
        return tuple(f"{self.name}/round_{number}" for number in range(1, len(self.rounds) + 1))


def load_questions(path: Path = QUESTIONS, image: Path | None = None) -> tuple[Question, ...]:
    """Reads the questions; questions about one photograph follow each other.

    Args:
        path: A TOML file of `[[question]]` tables; images are relative to it.
        image: Replaces the first photograph; the questions about the other photographs are left out.

    Raises:
        HarnessError: The file is missing or has no questions, or a question is incomplete or contradicts itself.
    """
    return read_questions(path, _question, image)


def _question(table: dict[str, Any], path: Path) -> Question:
    check_keys(table, Question, f"question {table.get('name')!r}")
    question = Question(
        name=table["name"],
        image=path.parent / table["image"],
        rounds=tuple(_round(round_table, table["name"]) for round_table in table["rounds"]),
        multimask=bool(table.get("multimask", True)),
        float64=bool(table.get("float64", True)),
    )
    if not question.rounds or not (question.rounds[0].points or question.rounds[0].box):
        raise ValueError(f"question {question.name!r} asks for nothing in its first round")
    return question


def _round(round_table: dict[str, Any], name: str) -> Round:
    check_keys(round_table, Round, f"a round of question {name!r}")
    points = tuple((float(x), float(y)) for x, y in round_table.get("points", ()))
    labels = tuple(int(label) for label in round_table.get("labels", ()))
    if len(points) != len(labels):
        raise ValueError(f"a round of question {name!r} has another number of labels than of points")
    box = round_table.get("box")
    if box is None:
        return Round(points, labels)
    x0, y0, x1, y1 = map(float, box)
    return Round(points, labels, (x0, y0, x1, y1))

"""Reads the questions to the whole model, which are photographs and prompts, from `fixtures/end_to_end.toml`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.settings import REPOSITORY
from harness.models.sam3.questions import check_keys, read_questions

QUESTIONS = REPOSITORY / "fixtures" / "end_to_end.toml"


@dataclass(frozen=True)
class Question:
    """A photograph and a prompt; coordinates are normalized to [0, 1].

    Attributes:
        name: Name in reports.
        image: Path of the photograph.
        texts: Noun phrases, one for each answer of a batch; empty for a prompt of boxes and points alone.
        boxes: (center x, center y, width, height) of each box.
        box_labels: Whether each box is positive.
        points: (x, y) of each point.
        point_labels: Whether each point is positive.
        float64: Whether the answers are also held to float64.
    """

    name: str
    image: Path
    texts: tuple[str, ...] = ()
    boxes: tuple[tuple[float, float, float, float], ...] = ()
    box_labels: tuple[bool, ...] = ()
    points: tuple[tuple[float, float], ...] = ()
    point_labels: tuple[bool, ...] = ()
    float64: bool = True

    @property
    def answers(self) -> tuple[str, ...]:
        """Returns the names of the answers: the question's own, or one for each text of a batch."""
        if len(self.texts) < 2:
            return (self.name,)
        return tuple(f"{self.name}/{number}" for number in range(1, len(self.texts) + 1))


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
    question = Question(
        name=table["name"],
        image=path.parent / table["image"],
        texts=tuple(table.get("texts", ())),
        boxes=tuple((float(cx), float(cy), float(w), float(h)) for cx, cy, w, h in table.get("boxes", ())),
        box_labels=tuple(map(bool, table.get("box_labels", ()))),
        points=tuple((float(x), float(y)) for x, y in table.get("points", ())),
        point_labels=tuple(map(bool, table.get("point_labels", ()))),
        float64=bool(table.get("float64", True)),
    )
    check_keys(table, Question, f"question {question.name!r}")
    if (len(question.box_labels), len(question.point_labels)) != (len(question.boxes), len(question.points)):
        raise ValueError(f"question {question.name!r} has another number of labels than of boxes or points")
    geometric = question.boxes or question.points
    if not question.texts and not geometric:
        raise ValueError(f"question {question.name!r} asks for nothing")
    if len(question.texts) > 1 and geometric:
        raise ValueError(f"question {question.name!r} is a batch of texts with boxes or points")
    return question

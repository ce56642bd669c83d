"""Reads what upstream's model and the compiled model are asked from TOML files in `fixtures/`."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.precision import PRECISIONS
from harness.runtime.decoding import Value, convert


class Fixture(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of a TOML file, whose keys are the fields of a subclass; it raises ValueError if its values are wrong."""

    def description(self) -> str:
        """Returns the fields as text, with the names of files and without their folders."""
        fields = msgspec.structs.asdict(self)
        return repr({name: value.name if isinstance(value, Path) else value for name, value in fields.items()})

    def digest(self) -> str:
        """Returns the SHA-256 of the files that the fields name, one after another."""
        files = (value for value in msgspec.structs.astuple(self) if isinstance(value, Path))
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class AnyQuestion(Fixture, frozen=True):
    """A question about a photograph or a video.

    Attributes:
        name: Name in reports.
        image: Path of the photograph or video.
    """

    name: str
    image: Path

    def is_asked(self, _case: Case) -> bool:
        """Returns whether the question is asked in a case."""
        return True

    def numbered(self, count: int, kind: str = "") -> tuple[str, ...]:
        """Returns the names of the answers: the question's own if there is one, numbered from 1 if there are more."""
        return (self.name,) if count < 2 else tuple(f"{self.name}/{kind}{number}" for number in range(1, count + 1))


class PhotographQuestion(AnyQuestion, frozen=True, kw_only=True):
    """A question about a photograph.

    Attributes:
        float64: Whether the answers are also held to float64, as all are in half precision.
    """

    float64: bool = True

    def is_asked(self, case: Case) -> bool:
        """Returns whether the question is asked in a case: in half precision those that are answered in float64."""
        return self.float64 or not PRECISIONS[case.precision].is_half


Question = TypeVar("Question", bound=AnyQuestion)


def read_fixture(path: Path, kind: type[Value], description: str) -> Value:
    """Reads a TOML file of a type; files that it names are relative to its folder.

    Raises:
        HarnessError: The file is missing, or is not of the type, for which errors have a description.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return convert(data, kind, lambda _kind, name: path.parent / name)
    except FileNotFoundError as error:
        raise HarnessError(f"{path} is missing: run from a checkout of the repository, which has fixtures/.") from error
    except ValueError as error:
        raise HarnessError(f"{path} is not {description}: {error}; correct it there.") from error


def read_questions(path: Path, kind: type[Question], image: Path | None = None) -> tuple[Question, ...]:
    """Reads the questions of a file; questions about one photograph follow each other.

    Args:
        path: A TOML file of `[[question]]` tables.
        kind: The class of the questions.
        image: Replaces the first photograph; the questions about the other photographs are left out.

    Raises:
        HarnessError: The file is missing or has no questions, or a question is incomplete or contradicts itself.
    """
    tables: Any = msgspec.defstruct("Questions", [("question", tuple[kind, ...])], forbid_unknown_fields=True)  # type: ignore[valid-type]
    questions: tuple[Question, ...] = read_fixture(path, tables, "a file of questions").question
    if not questions or len({question.name for question in questions}) < len(questions):
        raise HarnessError(f"{path} has no questions, or two of one name; correct it there.")
    photographs = list(dict.fromkeys(question.image for question in questions))
    if image is not None:
        first = [question for question in questions if question.image == photographs[0]]
        return tuple(msgspec.structs.replace(question, image=image) for question in first)
    return tuple(sorted(questions, key=lambda question: photographs.index(question.image)))

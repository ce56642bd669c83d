"""Reads the questions to a subject from `[[question]]` tables in `fixtures/`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from harness.core.errors import HarnessError


class ImageQuestion(Protocol):
    """A question about a photograph or a video; a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """Returns the name of the question in reports."""

    @property
    def image(self) -> Path:
        """Returns the path of the photograph."""


AnyQuestion = TypeVar("AnyQuestion", bound=ImageQuestion)


def read_questions(
    path: Path, parse: Callable[[dict[str, Any], Path], AnyQuestion], image: Path | None = None
) -> tuple[AnyQuestion, ...]:
    """Reads the questions of a file; questions about one photograph follow each other.

    Args:
        path: A TOML file of `[[question]]` tables; images are relative to it.
        parse: Makes a question from a table and the file's path; its Python errors say what is wrong with the table.
        image: Replaces the first photograph; the questions about the other photographs are left out.

    Raises:
        HarnessError: The file is missing or has no questions, or a question is incomplete or contradicts itself.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))["question"]
        questions = [parse(table, path) for table in tables]
    except FileNotFoundError as error:
        raise HarnessError(f"{path} is missing: verify in a checkout, which has fixtures/.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HarnessError(f"{path} is not a file of questions: {error!r}; correct it there.") from error
    if not questions or len({question.name for question in questions}) < len(questions):
        raise HarnessError(f"{path} has no questions, or two of one name; correct it there.")
    first_image = questions[0].image
    if image is not None:
        return tuple(replace(question, image=image) for question in questions if question.image == first_image)
    photographs = list(dict.fromkeys(question.image for question in questions))
    return tuple(sorted(questions, key=lambda question: photographs.index(question.image)))


def check_keys(table: Mapping[str, Any], kind: type[Any], table_name: str) -> None:
    """Checks that the keys of a table are fields of a dataclass.

    Args:
        table: A part of a TOML file.
        kind: The dataclass.
        table_name: Name of the table in the message.

    Raises:
        ValueError: The table has other keys; the message names them.
    """
    if unknown := set(table) - {field.name for field in fields(kind)}:
        raise ValueError(f"{table_name} has unknown keys {sorted(unknown)}")

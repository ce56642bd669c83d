"""Reading what a subject is asked: files of `[[question]]` tables in `fixtures/`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from harness.core.errors import HarnessError


class Asked(Protocol):
    """A question about a photograph; a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """What it is called in reports."""

    @property
    def image(self) -> Path:
        """Path of the photograph."""


AnyQuestion = TypeVar("AnyQuestion", bound=Asked)


def read_questions(
    path: Path, parse: Callable[[dict[str, Any], Path], AnyQuestion], image: Path | None = None
) -> tuple[AnyQuestion, ...]:
    """Reads the questions; those about one photograph follow each other.

    Args:
        path: A TOML file of `[[question]]` tables; images are relative to it.
        parse: Makes a question of a table and the file's path; errors of Python say what is wrong with a table.
        image: Another photograph: what is asked of the first one is asked of this, and nothing else.

    Raises:
        HarnessError: The file is missing, a question is incomplete or contradicts itself, or there is none.
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
    first = questions[0].image
    if image is not None:
        return tuple(replace(question, image=image) for question in questions if question.image == first)
    photographs = list(dict.fromkeys(question.image for question in questions))
    return tuple(sorted(questions, key=lambda question: photographs.index(question.image)))


def check_keys(table: Mapping[str, Any], kind: type[Any], what: str) -> None:
    """Checks that a table has no other keys than a dataclass has fields.

    Args:
        table: A part of a TOML file.
        kind: The dataclass.
        what: What the table says, for the message.

    Raises:
        ValueError: It has others, which are named.
    """
    if unknown := set(table) - {field.name for field in fields(kind)}:
        raise ValueError(f"{what} has unknown keys {sorted(unknown)}")

"""Defines the questions to whole models, and reads them from `[[question]]` tables in `fixtures/`."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from harness.core.errors import HarnessError


class AnyQuestion(Protocol):
    """A question about a photograph or a video; a frozen dataclass that checks itself."""

    @property
    def name(self) -> str:
        """Returns the name of the question in reports."""

    @property
    def image(self) -> Path:
        """Returns the path of the photograph or video."""

    def digest(self) -> str:
        """Returns the SHA-256 of the photograph or video."""


@dataclass(frozen=True)
class PhotographQuestion:
    """A question about a photograph.

    Attributes:
        name: Name in reports.
        image: Path of the photograph.
    """

    name: str
    image: Path

    def digest(self) -> str:
        """Returns the SHA-256 of the photograph's file."""
        return hashlib.sha256(self.image.read_bytes()).hexdigest()


Question = TypeVar("Question", bound=AnyQuestion)


def read_questions(path: Path, kind: type[Question], image: Path | None = None) -> tuple[Question, ...]:
    """Reads the questions of a file; questions about one photograph follow each other.

    Args:
        path: A TOML file of `[[question]]` tables; images are relative to it.
        kind: Dataclass of the questions, whose fields are the keys; it raises ValueError if its values are wrong.
        image: Replaces the first photograph; the questions about the other photographs are left out.

    Raises:
        HarnessError: The file is missing or has no questions, or a question is incomplete or contradicts itself.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))["question"]
        questions: list[Question] = [_convert(kind, table, path.parent) for table in tables]
    except FileNotFoundError as error:
        raise HarnessError(f"{path} is missing: verify in a checkout, which has fixtures/.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HarnessError(f"{path} is not a file of questions: {error!r}; correct it there.") from error
    if not questions or len({question.name for question in questions}) < len(questions):
        raise HarnessError(f"{path} has no questions, or two of one name; correct it there.")
    first_image = questions[0].image
    if image is not None:
        return tuple(
            replace(question, image=image)  # type: ignore[type-var]  # questions are dataclasses
            for question in questions
            if question.image == first_image
        )
    photographs = list(dict.fromkeys(question.image for question in questions))
    return tuple(sorted(questions, key=lambda question: photographs.index(question.image)))


def _convert(hint: Any, value: Any, folder: Path) -> Any:
    """Converts a value of a TOML file to the type of a field; paths are relative to a folder."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return _convert_table(hint, value, folder)
    if origin is tuple:
        types = args[:1] * len(value) if args[-1] is Ellipsis else args
        return tuple(_convert(part_type, part, folder) for part_type, part in zip(types, value, strict=True))
    if origin is UnionType:
        return _convert(args[0], value, folder)
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{value!r} is none of {', '.join(args)}")
        return value
    return folder / value if hint is Path else hint(value)


def _convert_table(kind: Any, table: Mapping[str, Any], folder: Path) -> Any:
    hints = get_type_hints(kind)
    if unknown := set(table) - set(hints):
        raise ValueError(f"{kind.__name__.lower()} {table.get('name', '')!r} has unknown keys {sorted(unknown)}")
    return kind(**{key: _convert(hints[key], value, folder) for key, value in table.items()})

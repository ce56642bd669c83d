"""Makes values of declared types from JSON and other plain data, and says in a clause which field is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec

Value = TypeVar("Value")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of bytes, elements or other things."""


def decode(text: bytes | str) -> Any:
    """Decodes JSON to plain data.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def convert(data: Any, kind: type[Value], make: Callable[[type, Any], Any] | None = None) -> Value:
    """Makes a value of a type from plain data; integers are accepted as floats, otherwise types must be equal.

    Args:
        data: The data.
        kind: The type.
        make: Makes values of the types that plain data do not have; it takes the type and the data.

    Raises:
        ValueError: The data do not have this form. The clause names the field as a path, and says what is wrong:
            ``files[...].bytes`: Expected `int`, got `str``.
    """
    try:
        return msgspec.convert(data, kind, dec_hook=make)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        place = path.strip("`").removeprefix("$").removeprefix(".")
        raise ValueError(f"`{place}`: {problem}" if place else problem) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error

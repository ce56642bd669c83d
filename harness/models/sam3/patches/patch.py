"""Defines a patch, which lifts one upstream assumption for the duration of a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One upstream assumption, and the function that lifts it.

    Attributes:
        name: Short name, unique in the table.
        assumption: The assumption, as a clause.
        location: The upstream file and function.
        reason: The failure without the patch.
        needed: Whether this machine and this version of sam3 need it.
        apply: Lifts the assumption for the duration of the context and restores everything afterwards.
    """

    name: str
    assumption: str
    location: str
    reason: str
    needed: Callable[[], bool]
    apply: Callable[[], AbstractContextManager[None]]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets `owner.name` to `value` for the duration of the context.

    Afterwards the raw entry (a staticmethod, say) is restored; an inherited attribute becomes inherited again.
    """
    original = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@cache
def source(path: str) -> str:
    """Returns the text of one file of the installed sam3 package, without an import; empty if the file is missing."""
    spec = find_spec("sam3")
    if spec is None or not spec.submodule_search_locations:
        return ""
    file = Path(spec.submodule_search_locations[0]) / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""

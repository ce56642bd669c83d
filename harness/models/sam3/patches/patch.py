"""Patch: one upstream assumption, lifted for the duration of a context and put back afterwards."""

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
    """One upstream assumption and how it is lifted.

    Attributes:
        name: Short name, unique in the table.
        what: What upstream assumes.
        where: The upstream file and function.
        why: What breaks without the patch.
        needed: Whether this machine and this version of sam3 need it.
        apply: Lifts the assumption for the duration of the context, puts everything back afterwards.
    """

    name: str
    what: str
    where: str
    why: str
    needed: Callable[[], bool]
    apply: Callable[[], AbstractContextManager[None]]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets `owner.name` to `value` for the duration of the context.

    The raw entry (a staticmethod, say) comes back afterwards; an inherited attribute becomes inherited again.
    """
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@cache
def source(path: str) -> str:
    """Reads one file of the installed sam3 package without importing it; the text is empty if there is none."""
    spec = find_spec("sam3")
    if spec is None or not spec.submodule_search_locations:
        return ""
    file = Path(spec.submodule_search_locations[0]) / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""

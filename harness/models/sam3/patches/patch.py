"""Defines a patch, which lifts one upstream assumption in a context, and records calls of upstream's methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from inspect import signature
from typing import Any

from harness.models.sam3.vocabulary import package_folder

_ABSENT = object()


@dataclass(frozen=True)
class Patch:
    """One upstream assumption, and the function that lifts it.

    Attributes:
        name: Short name, unique in the table.
        needed: Whether this machine and this version of sam3 need it.
        apply: Lifts the assumption for the duration of the context and restores everything afterwards. Its docstring
            has the assumption with upstream's file and function, and what fails without the patch.
    """

    name: str
    needed: Callable[[], bool]
    apply: Callable[[], AbstractContextManager[None]]


def patch(needed: Callable[[], bool]) -> Callable[[Callable[[], AbstractContextManager[None]]], Patch]:
    """Returns a decorator that makes a patch, and names it, of the function that applies it."""
    return lambda apply: Patch(apply.__name__, needed, apply)


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


def wrapped(owner: Any, name: str, wrapper: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replaces the function or method `owner.name` by `wrapper`, which takes the original before its arguments."""
    original = getattr(owner, name)

    @wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return replaced(owner, name, call)


@dataclass(frozen=True)
class Call:
    """One call of a method: its arguments by name, defaults included, and its result."""

    arguments: dict[str, Any]
    result: Any


@contextmanager
def recorded_methods(owner: Any, *names: str) -> Iterator[dict[str, list[Call]]]:
    """Records every call of methods of an object, by method name and in order, for the duration of the context."""
    calls: dict[str, list[Call]] = {name: [] for name in names}

    def record(own_calls: list[Call], method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        bound = signature(method).bind(*args, **kwargs)
        bound.apply_defaults()
        result = method(*args, **kwargs)
        own_calls.append(Call(dict(bound.arguments), result))
        return result

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(wrapped(owner, name, partial(record, calls[name])))
        yield calls


@cache
def source(path: str) -> str:
    """Returns the text of one file of the installed sam3 package; empty if the file is missing."""
    folder = package_folder()
    return (folder / path).read_text(encoding="utf-8") if folder and (folder / path).is_file() else ""

"""Checks names that a user gives against those that a registry knows, and writes numbers with their nouns."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from harness.core.errors import HarnessError


def select_names(kind: str, names: Sequence[str], registered_names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names without repetition, or all known names if none is given.

    Raises:
        HarnessError: A name is unknown; the error suggests the nearest known one.
    """
    for name in names:
        if name not in registered_names:
            nearest = get_close_matches(name, registered_names, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known are {', '.join(registered_names)}."
            raise HarnessError(f"Unknown {kind} {name!r}: {hint}")
    return tuple(dict.fromkeys(names)) or tuple(registered_names)


def plural(amount: int, noun: str) -> str:
    """Formats a number with its noun in singular or plural."""
    return f"{amount} {noun}{'' if amount == 1 else 's'}"

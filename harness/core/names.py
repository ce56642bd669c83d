"""Names that a user gives, held to those that a registry knows."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from harness.core.errors import HarnessError


def checked(kind: str, names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Returns the names without repetition, or all that are known if none is given.

    Raises:
        HarnessError: If a name is unknown; the nearest known one is suggested.
    """
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}."
            raise HarnessError(f"Unknown {kind} {name!r}: {hint}")
    return tuple(dict.fromkeys(names)) or tuple(known)

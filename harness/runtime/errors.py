"""Errors of the runtime, which end in one sentence for the user instead of a traceback."""

from __future__ import annotations


class Sam3Error(Exception):
    """A mistake in what the runtime was given, told in one sentence: what was wrong, where, and what to do.

    The command prints it as `error: …` and exits with 2, like a `HarnessError`, which the runtime does not know.
    """


def reason(error: BaseException) -> str:
    """Returns what an error of a library says, in one line, for a sentence that quotes it."""
    said = getattr(error, "strerror", None) or str(error)
    return " ".join(said.split()) or type(error).__name__

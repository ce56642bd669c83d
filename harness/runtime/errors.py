"""Defines the runtime's errors, which reach the user as one sentence instead of a traceback."""

from __future__ import annotations


class ModelError(Exception):
    """An error in the input of the runtime, described in one sentence: what is wrong, where, and what to do.

    The command prints it as `error: …` and exits with 2, like a `HarnessError`, which the runtime does not import.
    """


def reason(error: BaseException) -> str:
    """Returns the message of an error of a library in one line, to be quoted in a sentence."""
    message = getattr(error, "strerror", None) or str(error)
    return " ".join(message.split()) or type(error).__name__

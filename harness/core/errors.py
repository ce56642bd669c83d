"""Defines the error that ends in one sentence for the user instead of a traceback."""

from __future__ import annotations


class HarnessError(Exception):
    """A mistake in the input or the environment. The sentence says what is wrong, where, and what to do.

    The command prints it as `error: …` and exits with 2.
    """

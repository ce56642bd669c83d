"""Loads a compiled SAM 3, displays that, and warns about its weights."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from harness.cli.console import console, print_sentence
from harness.runtime import Sam3
from harness.runtime.manifest import Manifest
from harness.runtime.preparing import prepared


def load_model(folder: Path) -> Sam3:
    """Loads a compiled model, with a message if weights are first packed for this CPU.

    Raises:
        ModelError: The model cannot be loaded.
    """
    with console.status(Text(f"Loading {folder}")):
        return Sam3.load(prepared(folder, print_sentence))


def untrained_warning(manifest: Manifest) -> str:
    """Returns the warning that the results of a model without trained weights are meaningless."""
    return f"The weights are untrained ({manifest.weights}): the masks are meaningless."


def warn_if_untrained(manifest: Manifest) -> None:
    """Prints the warning `untrained_warning` if the weights are untrained."""
    if not manifest.trained:
        console.print(untrained_warning(manifest), style="yellow", highlight=False, soft_wrap=True)

"""Loads a compiled model, and displays that."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from harness.cli.console import console, print_sentence
from harness.runtime import Sam3
from harness.runtime.preparing import prepared


def load_model(folder: Path) -> Sam3:
    """Loads a compiled model, with a message if weights are first packed for this CPU.

    Raises:
        Sam3Error: The model cannot be loaded.
    """
    with console.status(Text(f"Loading {folder}")):
        return Sam3.load(prepared(folder, print_sentence))

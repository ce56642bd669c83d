"""Loading a compiled model, watched."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from harness.cli.console import console
from harness.runtime import Sam3
from harness.runtime.preparing import prepared


def load_model(folder: Path) -> Sam3:
    """Loads a compiled model; says so, and where weights are packed for this CPU first.

    Raises:
        Sam3Error: It cannot be loaded.
    """

    def tell(sentence: str) -> None:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    with console.status(Text(f"Loading {folder}")):
        return Sam3.load(prepared(folder, tell))

"""Where the commands print, and how the two that make a compiled model tell what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from harness.runtime.manifest import Manifest

console = Console()


def complain(sentence: str) -> None:
    """Prints a sentence as it is, on stderr."""
    Console(stderr=True).print(sentence, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def stages(title: str) -> Iterator[Callable[[str], None]]:
    """Shows the stage that runs, and the time of each that has ended."""
    start, running = time.perf_counter(), ""

    def announce(stage: str) -> None:
        nonlocal start, running
        now = time.perf_counter()
        if running:
            console.print(f"{running:<22} {now - start:6.1f} s", highlight=False)
        start, running = now, stage
        status.update(f"{title}: {stage}")

    with console.status(title) as status:
        yield announce
        announce("")


def tell_artifact(folder: Path, manifest: Manifest) -> None:
    """Prints what a compiled model is."""
    size = sum(file.bytes for file in manifest.files.values())
    clicks = f", {manifest.capacity.clicks} clicks on an object" if manifest.capacity.clicks else ""
    console.print(
        f"{folder}: {manifest.scale} scale, {manifest.target} ({manifest.cpu}), {manifest.precision}, "
        f"weights from {manifest.weights}, "
        f"{size / 1e6:.0f} MB in {len(manifest.files) + 1} files; up to {manifest.capacity.points} points "
        f"and {manifest.capacity.boxes} boxes a prompt{clicks}.",
        highlight=False,
        soft_wrap=True,
    )

"""Prints to the terminal, in the formats that several commands share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from harness.runtime.manifest import Manifest, is_for_several, read_variants

console = Console(markup=False)
"""Prints text without markup, because names of files may have brackets."""


def print_sentence(sentence: str) -> None:
    """Prints a sentence without colours, in lines that only the terminal wraps."""
    console.print(sentence, highlight=False, soft_wrap=True)


def print_error(sentence: str) -> None:
    """Prints a sentence on stderr, without markup."""
    Console(stderr=True).print(sentence, markup=False, highlight=False, soft_wrap=True)


def progress(unit: str) -> Progress:
    """Returns a progress bar with counts and speed, which only terminals show and which is removed at the end.

    Args:
        unit: The counted things, in the plural.
    """
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(unit),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class _Rate(ProgressColumn):
    """Units per second so far."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.2f} {self._unit}/s")


@contextmanager
def running_stage(title: str) -> Iterator[Callable[[str], None]]:
    """Shows a title and the running stage, which the yielded function takes."""
    with console.status(title) as status:
        yield lambda stage: status.update(f"{title} {stage}")


@contextmanager
def stages(title: str) -> Iterator[Callable[[str], None]]:
    """Shows the running stage, and prints the duration of each finished one."""
    start, current_stage = time.perf_counter(), ""

    def on_stage(stage: str) -> None:
        nonlocal start, current_stage
        now = time.perf_counter()
        if current_stage:
            console.print(f"{current_stage:<22} {now - start:6.1f} s", highlight=False)
        start, current_stage = now, stage
        status.update(Text(f"{title}: {stage}"))

    with console.status(Text(title)) as status:
        yield on_stage
        on_stage("")


def print_artifact(folder: Path, manifest: Manifest, summary: str) -> None:
    """Prints a description of a compiled model; `summary` says what the model takes and may be empty."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    cpus = ", ".join(read_variants(folder).names) if is_for_several(folder) else manifest.cpu
    print_sentence(
        f"{folder}: {manifest.scale} scale, {manifest.target} ({cpus}), {manifest.precision}, "
        f"weights from {manifest.weights}, "
        f"{size / 1e6:.0f} MB in {len(files)} files{summary and f'; {summary}'}."
    )

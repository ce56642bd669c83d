"""What `tune` shows: sentences, durations, and a bar with what is left of time and trials."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from harness.core.case import Case
from harness.core.errors import HarnessError

if TYPE_CHECKING:
    from harness.cli.tune import Request

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of the signal."""
_DEFAULT_MINUTES = 10.0


def say(console: Console, text: str) -> None:
    """Prints text as it is, on one line however long it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def say_stopped(console: Console, folder: Path) -> int:
    """Says what to do after Ctrl-C, and gives the exit code."""
    say(console, f"Stopped; what was measured is in {folder}. The same command goes on from there.")
    return INTERRUPTED


def duration(seconds: float) -> str:
    """In milliseconds, or microseconds if it is short."""
    return f"{1000 * seconds:.2f} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.1f} us"


def looked_for(console: Console, case: Case, function: str, argument: Any) -> Any:
    """The tasks of a component, from a function that `harness.processes` calls in a process of its own.

    Raises:
        HarnessError: It could not tell.
    """
    from harness.processes import WorkerEnd, run_isolated

    text = f"Looking for tasks: {case.component}"
    with console.status(text) as status:
        ended = run_isolated(function, argument, breadcrumb=lambda stage: status.update(f"{text} {stage}"))
    if ended.kind is not WorkerEnd.OK:
        reason = ended.error.message.partition("\n")[0] if ended.error else ended.kind.value
        raise HarnessError(f"cannot tune {case.component}: {ended.stage or 'start'}: {reason}")
    return ended.value


@contextmanager
def shown(
    console: Console, request: Request, title: str
) -> Iterator[tuple[Callable[[int], bool], Callable[[str], None]]]:
    """A bar with the task at work and what is left.

    Args:
        console: Where to draw it; nothing is drawn unless that is a terminal.
        request: Says how many minutes and trials there are.
        title: What stands beside the bar before the first trial.

    Yields:
        (trials so far) → whether there may be another; and what to call after each trial, with what is known by then.
    """
    minutes = _DEFAULT_MINUTES if request.minutes is None and request.trials is None else request.minutes
    start = time.monotonic()
    made = 0

    def left() -> float:
        return math.inf if minutes is None else 60 * minutes - (time.monotonic() - start)

    def go_on(done: int) -> bool:
        return left() > 0 and (request.trials is None or done < request.trials)

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task(title, total=request.trials if minutes is None else 60 * minutes, left="")

        def after_trial(text: str) -> None:
            nonlocal made
            made += 1
            limits = [] if minutes is None else [f"{max(0.0, left()) / 60:.1f} min left"]
            limits += [] if request.trials is None else [f"{max(0, request.trials - made)} trials left"]
            done = made if minutes is None else time.monotonic() - start
            progress.update(bar, description=text, completed=done, left=", ".join(limits))

        yield go_on, after_trial

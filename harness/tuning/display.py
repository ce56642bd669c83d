"""The output of `sam3-tvm tune`: lines, a bar with the rest of time and trials, and the table of results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box, progress
from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.tuned.trials import Kind

if TYPE_CHECKING:
    from harness.tuning.search import Progress

_DEFAULT_MINUTES = 10.0
"""Time limit of a search that was given no limit at all."""


@dataclass(frozen=True)
class Budget:
    """The limits of a search.

    Attributes:
        minutes: Time limit in minutes; None for no limit.
        trials: Largest number of trials; None for no limit.
        start: Time at which the search began, on the monotonic clock.
    """

    minutes: float | None
    trials: int | None
    start: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, minutes: float | None, trials: int | None) -> Budget:
        """Makes the budget of a search that begins now; without any limit it gets ten minutes."""
        return cls(_DEFAULT_MINUTES if minutes is None and trials is None else minutes, trials)

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit; infinite without one."""
        return math.inf if self.minutes is None else 60 * self.minutes - (time.monotonic() - self.start)

    def allows_more(self, made: int) -> bool:
        """Returns whether another trial may begin after this many."""
        return self.seconds_left > 0 and (self.trials is None or made < self.trials)

    def describe_rest(self, made: int) -> str:
        """Returns what is left of the budget after this many trials."""
        limits = [] if self.minutes is None else [f"{max(0.0, self.seconds_left) / 60:.1f} min left"]
        limits += [] if self.trials is None else [f"{max(0, self.trials - made)} trials left"]
        return ", ".join(limits)


@contextmanager
def progress_bar(console: Console, budget: Budget, title: str) -> Iterator[Callable[[str], None]]:
    """Shows a bar with the current task and what is left of the budget.

    Args:
        console: The console to draw on; nothing is drawn unless it is a terminal.
        budget: The limits of the search.
        title: The text beside the bar before the first trial.

    Yields:
        A function that is called after each trial with a description of its task.
    """
    made = 0
    total = budget.trials if budget.minutes is None else 60 * budget.minutes
    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(bar_width=20),
        progress.TextColumn("{task.fields[left]}"),
    )
    with progress.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(title, total=total, left="")

        def advance(text: str) -> None:
            nonlocal made
            made += 1
            completed = made if budget.minutes is None else time.monotonic() - budget.start
            bars.update(bar, description=text, completed=completed, left=budget.describe_rest(made))

        yield advance


def print_line(console: Console, text: str) -> None:
    """Prints text literally, on one line however long it is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def format_duration(seconds: float) -> str:
    """Writes a duration in nine characters at most: in microseconds, milliseconds or seconds."""
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{1000 * seconds:.2f} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.1f} us"


def describe_progress(state: Progress) -> str:
    """Returns one line about a task and its best schedule so far."""
    parts = [f"{state.task.key} (x{state.task.calls}): {len(state.trials)} trials"]
    default = state.default_seconds
    if math.isfinite(default):
        best = default * state.best_ratio
        parts.append(f"default {format_duration(default)}")
        parts.append(f"best {1 / state.best_ratio:.2f} x default")
        if state.torch_seconds:
            parts.append(f"{state.torch_seconds / best:.2f} x PyTorch")
    return ", ".join(parts)


def results_table(states: Sequence[Progress], folder: Path) -> Table:
    """Returns the results of a search, the tasks that cost the most first.

    The key of a task comes last. It alone is wrapped where the console is narrow, between words if they fit, so that
    all of it is shown.
    """
    table = Table(title=str(folder), highlight=False, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for header in ("calls", "default", "tuned", "gain", "PyTorch\n/ tuned", "trials"):
        table.add_column(header, no_wrap=True, justify="right", vertical="top")
    table.add_column("task", overflow="fold")
    for state in sorted(states, key=_total_seconds, reverse=True):
        counts = [str(len(state.trials))]
        counts += [f"{count} {kind.value}" for kind in (Kind.FAILED, Kind.REJECTED) if (count := state.count(kind))]
        table.add_row(str(state.task.calls), *_measured_columns(state), "\n".join(counts), Text(state.task.key))
    return table


def _total_seconds(state: Progress) -> float:
    """Returns the seconds that a task takes in one run of the components; 0 if it was not measured."""
    return 0.0 if math.isnan(state.default_seconds) else float(state.task.calls * state.default_seconds)


def _measured_columns(state: Progress) -> tuple[str, str, str, str]:
    """Returns the default's time, the tuned time, the gain and the ratio of PyTorch's time to the tuned time."""
    record = state.record
    if record is not None:
        default, tuned, torch = record.default_seconds, record.seconds, record.torch_seconds
        gain = f"{record.gain:.2f} x"
    elif math.isnan(state.default_seconds):
        return "", "not tried", "", ""
    else:
        default = tuned = state.default_seconds
        torch, gain = state.torch_seconds, "none"
    ratio = "" if torch is None else f"{torch / tuned:.2f}"
    return format_duration(default), format_duration(tuned), gain, ratio


def describe_totals(states: Sequence[Progress]) -> str:
    """Returns one sentence about all tasks together."""
    measured = [state for state in states if math.isfinite(state.default_seconds)]
    if not measured:
        return "No task was measured."
    found = sum(state.record is not None for state in states)
    before = sum(map(_total_seconds, measured))
    after = sum(_total_seconds(state) / (1.0 if state.record is None else state.record.gain) for state in measured)
    return (
        f"{found} of {len(states)} tasks have a schedule better than the default; the {len(measured)} that were "
        f"measured take {format_duration(before)} together, {format_duration(after)} with what was found: "
        f"{before / after:.3f} x."
    )

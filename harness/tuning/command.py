"""What the `tune` command does with its options, and what it prints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from harness.case import DEFAULT_STRATEGY, Case, select
from harness.components import COMPONENTS
from harness.errors import HarnessError
from harness.tuning import database
from harness.tuning.trials import Kind

if TYPE_CHECKING:
    from harness.tuning.measuring import Array
    from harness.tuning.tasks import Task

DEFAULT_MINUTES = 10.0
SPACES = ("schedules", "rules")
INTERRUPTED = 130


@dataclass(frozen=True)
class Request:
    """What to tune, for how long, and where to keep what is found.

    Attributes:
        components: Their names; all if there is none.
        target: Name of the target.
        scale: `shallow` or `full`: decides how often each task counts.
        minutes: When to stop; None for no limit.
        trials: How many schedules to try at most; None for no limit.
        folder: The database; None for the one in `fixtures/tuned` that fits.
        space: One of `SPACES`.
        seed: Of candidates and inputs.
        remote: HOST:PORT of an RPC tracker; None to measure here.
        key: What servers are known by at the tracker.
        only: A regular expression that names of tasks must match, with space `rules`; None for all.
    """

    components: tuple[str, ...] = ()
    target: str = "llvm"
    scale: str = "shallow"
    minutes: float | None = None
    trials: int | None = None
    folder: Path | None = None
    space: str = SPACES[0]
    seed: int = 0
    remote: str | None = None
    key: str = ""
    only: str | None = None


def checked(request: Request) -> tuple[Case, ...]:
    """The cases whose components are to be tuned.

    Raises:
        HarnessError: The request makes no sense.
    """
    if request.space not in SPACES:
        raise HarnessError(f"Unknown space {request.space!r}: known are {', '.join(SPACES)}.")
    if request.minutes is not None and not request.minutes > 0:
        raise HarnessError(f"--minutes {request.minutes:g} leaves no time to tune: give more than 0.")
    if request.trials is not None and request.trials < 1:
        raise HarnessError(f"--trials {request.trials} tries nothing: give 1 or more.")
    if request.target not in database.TUNABLE:
        raise HarnessError(
            f"cannot tune for {request.target!r}: there are schedules to search for {', '.join(database.TUNABLE)} only"
        )
    for name in request.components:
        if name not in COMPONENTS and name == "end_to_end":
            raise HarnessError("end_to_end is no component: tune the components that it is made of")
    return select(request.components, (DEFAULT_STRATEGY,), (request.target,), (request.scale,), request.seed)


def tune(console: Console, request: Request) -> int:
    """Searches, and prints how it goes and what was found.

    Returns:
        The exit code: 0, or 130 if it was interrupted.

    Raises:
        HarnessError: The request makes no sense, there is nothing to tune, or the database cannot be used.
    """
    cases = checked(request)
    place = database.this_place(request.target)
    folder = request.folder or database.TUNED / place.tag
    database.check_writable(folder)
    if request.space == "rules":
        from harness.tuning.rules import tune_rules

        code: int = tune_rules(console, request, cases, folder)
        return code
    return _tune_schedules(console, request, cases, folder)


def _tune_schedules(console: Console, request: Request, cases: Sequence[Case], folder: Path) -> int:
    from harness.machine import describe_machine
    from harness.schedules.cpu.tile import vector_unit
    from harness.targets import TARGETS
    from harness.tuning.local import LocalBuilder, LocalRunner, TorchRunner
    from harness.tuning.search import Bench, begin, search
    from harness.tuning.trials import read_trials

    known = (folder / database.FILE).exists()
    opened = database.open_database(folder, request.target) if known else database.Database(folder, request.target)
    trials, notices = read_trials(folder)
    for notice in (*opened.notices(), *notices):
        console.print(f"Note: {notice}", markup=False, highlight=False, soft_wrap=True)
    place = database.this_place(request.target)
    target = TARGETS[request.target].tvm_target()
    runner: Any = LocalRunner()
    machine = str(describe_machine()["cpu"])
    if request.remote is not None:
        from harness.tuning.remote import RemoteRunner

        # Before any work: there may be no tracker, or no server.
        runner = RemoteRunner(request.remote, request.key)
        machine = f"servers known as {request.key}"
    tasks = _tasks(console, cases)
    states = begin(tasks, vector_unit(target), place, trials, opened.records)
    earlier = sum(len(state.trials) for state in states)
    if earlier:
        console.print(f"Going on after {earlier} trials in {folder}.", markup=False, highlight=False, soft_wrap=True)
    interrupted = False
    with ExitStack() as stack:
        builder, torch = LocalBuilder(target), TorchRunner()
        for worker in (builder, runner, torch):
            stack.callback(worker.close)

        def in_torch(task: Task, arrays: Sequence[Path]) -> tuple[float | None, Array]:
            seconds, exact = torch.run(task.problem, arrays)
            # PyTorch runs here, whatever machine measures the rest.
            return seconds if request.remote is None else None, exact

        bench = Bench(builder, runner, in_torch, place, folder, machine, request.seed)
        with _shown(console, request, states) as (go_on, on_trial):
            try:
                for batch in search(states, bench, go_on, on_trial):
                    console.print(_told(batch.state), markup=False, highlight=False, soft_wrap=True)
            except KeyboardInterrupt:
                interrupted = True
    console.print(_table(states, folder))
    for state in states:
        if state.problem:
            console.print(f"Note: {state.problem}", markup=False, highlight=False, soft_wrap=True)
    console.print(_sum(states), markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        console.print(
            f"Stopped; what was measured is in {folder}. The same command goes on from there.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return INTERRUPTED
    return 0


def _tasks(console: Console, cases: Sequence[Case]) -> list[Any]:
    from harness.tuning.tasks import merged
    from harness.worker import WorkerEnd, run_isolated

    groups = []
    for case in cases:
        with console.status(f"Looking for tasks: {case.component}") as status:
            ended = run_isolated(
                "harness.tuning.tasks:component_tasks",
                case,
                breadcrumb=lambda stage, case=case: status.update(f"Looking for tasks: {case.component} {stage}"),  # type: ignore[misc]
            )
        if ended.kind is not WorkerEnd.OK:
            reason = ended.error.message.partition("\n")[0] if ended.error else ended.kind.value
            raise HarnessError(f"cannot tune {case.component}: {ended.stage or 'start'}: {reason}")
        groups.append(ended.value)
    return merged(groups, ", ".join(case.component for case in cases))


@contextmanager
def _shown(
    console: Console, request: Request, states: Sequence[Any]
) -> Iterator[tuple[Callable[[int], bool], Callable[[Any, Any], None]]]:
    """A bar with the task at work and the time left; what tells whether to go on, and what to call after a trial."""
    minutes = DEFAULT_MINUTES if request.minutes is None and request.trials is None else request.minutes
    start = time.monotonic()
    made = 0

    def left() -> float:
        return math.inf if minutes is None else 60 * minutes - (time.monotonic() - start)

    def go_on(done: int) -> bool:
        return left() > 0 and (request.trials is None or done < request.trials)

    left_column = TextColumn("{task.fields[left]}")
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), left_column)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        total = request.trials if minutes is None else 60 * minutes
        shown = progress.add_task(f"{len(states)} tasks", total=total, left="")

        def on_trial(state: Any, _trial: Any) -> None:
            nonlocal made
            made += 1
            limits = [] if minutes is None else [f"{max(0.0, left()) / 60:.1f} min left"]
            limits += [] if request.trials is None else [f"{max(0, request.trials - made)} trials left"]
            done = made if minutes is None else time.monotonic() - start
            progress.update(shown, description=_told(state), completed=done, left=", ".join(limits))

        yield go_on, on_trial


def _told(state: Any) -> str:
    """One line about a task: what is known of it."""
    parts = [f"{state.task.key} (x{state.task.calls}): {len(state.trials)} trials"]
    default = state.default_seconds
    if math.isfinite(default):
        best = default * state.best_ratio
        parts.append(f"default {_time(default)}")
        parts.append(f"best {1 / state.best_ratio:.2f} x default")
        if state.torch_seconds:
            parts.append(f"{state.torch_seconds / best:.2f} x PyTorch")
    return ", ".join(parts)


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.1f} us"


def _table(states: Sequence[Any], folder: Path) -> Table:
    """What was found, the tasks that cost the most first."""
    table = Table(
        "task", "calls", "default", "tuned", "gain", "PyTorch / tuned", "trials", title=str(folder), highlight=False
    )

    def cost(state: Any) -> float:
        seconds = state.default_seconds
        return 0.0 if math.isnan(seconds) else float(state.task.calls * seconds)

    for state in sorted(states, key=cost, reverse=True):
        seconds = state.default_seconds
        if math.isnan(seconds) and state.record is None:
            table.add_row(Text(state.task.key), str(state.task.calls), "", "", "not tried", "", str(len(state.trials)))
            continue
        counts = [str(len(state.trials))]
        counts += [f"{count} {kind.value}" for kind in (Kind.FAILED, Kind.REJECTED) if (count := state.count(kind))]
        record = state.record
        if record is None:
            gain, tuned, torch = "nothing found over the default", _time(seconds), state.torch_seconds
            ratio = "" if torch is None else f"{torch / seconds:.2f}"
            default = seconds
        else:
            gain, tuned, default = f"{record.gain:.2f} x", _time(record.seconds), record.default_seconds
            ratio = "" if record.torch_seconds is None else f"{record.torch_seconds / record.seconds:.2f}"
        row = (_time(default), tuned, gain, ratio, ", ".join(counts))
        table.add_row(Text(state.task.key), str(state.task.calls), *row)
    return table


def _sum(states: Sequence[Any]) -> str:
    """All tasks together, in one sentence."""
    measured = [state for state in states if math.isfinite(state.default_seconds)]
    found = sum(state.record is not None for state in states)
    before = sum(state.task.calls * state.default_seconds for state in measured)
    gains = {state.task.key: 1.0 if state.record is None else state.record.gain for state in measured}
    after = sum(state.task.calls * state.default_seconds / gains[state.task.key] for state in measured)
    if not measured:
        return "No task was measured."
    return (
        f"{found} of {len(states)} tasks have a schedule better than the default; the {len(measured)} that were "
        f"measured take {_time(before)} together, {_time(after)} with what was found: {before / after:.3f} x."
    )

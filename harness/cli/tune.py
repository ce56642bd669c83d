"""What the `tune` command does with its options, and what it prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.models.registry import subjects
from harness.tuning import database
from harness.tuning.showing import duration, looked_for, say, say_stopped, shown
from harness.tuning.trials import Kind
from harness.verify.selection import select

if TYPE_CHECKING:
    from harness.tuning.measuring import Array
    from harness.tuning.remote import RemoteRunner
    from harness.tuning.search import Progress
    from harness.tuning.tasks import Task


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
        seed: Of candidates and inputs.
        remote: HOST:PORT of an RPC tracker; None to measure here.
        key: What servers are known by at the tracker.
    """

    components: tuple[str, ...] = ()
    target: str = "llvm"
    scale: str = "shallow"
    minutes: float | None = None
    trials: int | None = None
    folder: Path | None = None
    seed: int = 0
    remote: str | None = None
    key: str = ""


def checked(request: Request) -> tuple[Case, ...]:
    """The cases whose components are to be tuned.

    Raises:
        HarnessError: The request makes no sense.
    """
    if request.minutes is not None and not request.minutes > 0:
        raise HarnessError(f"--minutes {request.minutes:g} leaves no time to tune: give more than 0.")
    if request.trials is not None and request.trials < 1:
        raise HarnessError(f"--trials {request.trials} tries nothing: give 1 or more.")
    if request.target not in database.TUNABLE:
        raise HarnessError(
            f"cannot tune for {request.target!r}: there are schedules to search for {', '.join(database.TUNABLE)} only"
        )
    for name in request.components:
        if name in subjects() and subjects()[name].whole:
            raise HarnessError(f"{name} is no component: tune the components that it is made of")
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
        say(console, f"Note: {notice}")
    place = database.this_place(request.target)
    target = TARGETS[request.target].tvm_target()
    runner: LocalRunner | RemoteRunner = LocalRunner()
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
        say(console, f"Going on after {earlier} trials in {folder}.")
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
        with shown(console, request, f"{len(states)} tasks") as (go_on, after_trial):
            try:
                for batch in search(states, bench, go_on, lambda state, _: after_trial(_told(state))):
                    say(console, _told(batch.state))
            except KeyboardInterrupt:
                interrupted = True
    console.print(_table(states, folder))
    for state in states:
        if state.problem:
            say(console, f"Note: {state.problem}")
    say(console, _sum(states))
    return say_stopped(console, folder) if interrupted else 0


def _tasks(console: Console, cases: Sequence[Case]) -> list[Task]:
    from harness.tuning.tasks import merged

    groups = [looked_for(console, case, "harness.tuning.tasks:component_tasks", case) for case in cases]
    return merged(groups, ", ".join(case.component for case in cases))


def _told(state: Progress) -> str:
    """One line about a task: what is known of it."""
    parts = [f"{state.task.key} (x{state.task.calls}): {len(state.trials)} trials"]
    default = state.default_seconds
    if math.isfinite(default):
        best = default * state.best_ratio
        parts.append(f"default {duration(default)}")
        parts.append(f"best {1 / state.best_ratio:.2f} x default")
        if state.torch_seconds:
            parts.append(f"{state.torch_seconds / best:.2f} x PyTorch")
    return ", ".join(parts)


def _table(states: Sequence[Progress], folder: Path) -> Table:
    """What was found, the tasks that cost the most first."""
    table = Table(
        "task", "calls", "default", "tuned", "gain", "PyTorch / tuned", "trials", title=str(folder), highlight=False
    )

    def cost(state: Progress) -> float:
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
            gain, tuned, torch = "nothing found over the default", duration(seconds), state.torch_seconds
            ratio = "" if torch is None else f"{torch / seconds:.2f}"
            default = seconds
        else:
            gain, tuned, default = f"{record.gain:.2f} x", duration(record.seconds), record.default_seconds
            ratio = "" if record.torch_seconds is None else f"{record.torch_seconds / record.seconds:.2f}"
        row = (duration(default), tuned, gain, ratio, ", ".join(counts))
        table.add_row(Text(state.task.key), str(state.task.calls), *row)
    return table


def _sum(states: Sequence[Progress]) -> str:
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
        f"measured take {duration(before)} together, {duration(after)} with what was found: {before / after:.3f} x."
    )

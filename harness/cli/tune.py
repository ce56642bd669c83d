"""Defines `sam3-tvm tune`: searches for better schedules and stores them."""

from __future__ import annotations

import math
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options
from harness.cli.console import print_sentence, progress, running_stage
from harness.compiler.targets import HOST
from harness.compiler.tuned import database
from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import DEFAULT_STRATEGY, Case, Scale
from harness.core.errors import HarnessError
from harness.core.files import make_folder
from harness.core.precision import DEFAULT_PRECISION
from harness.core.processors import Processors
from harness.models.registry import component_of, subjects
from harness.models.selection import select

if TYPE_CHECKING:
    from harness.compiler.schedules.cpu.schedule import Workload

_DEFAULT_MINUTES = 10.0
"""Time limit of a search that was given no limit at all."""


def tune(
    component: Annotated[list[str] | None, typer.Option(help="Component; repeat for several. Default: all.")] = None,
    scale: Annotated[str, typer.Option(help="shallow or full: how often each kernel counts.")] = Scale.SHALLOW.value,
    precision: Annotated[str, typer.Option(help="Precision of what is tuned.")] = DEFAULT_PRECISION,
    budget: options.BudgetOption = None,
    minutes: Annotated[
        float | None,
        typer.Option(callback=options.check_number, help="Minutes to search. Default: 10, or until --trials."),
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Schedules to try at most.")] = None,
    db: Annotated[
        Path | None, typer.Option(help="Folder of the database. Default: this machine's in fixtures/tuned.")
    ] = None,
    threads: options.ThreadsOption = None,
    cpu: options.CpuOption = None,
) -> None:
    """Search for better schedules, and store them in a database that verify and compile use.

    Ctrl-C stops the search; the same command continues it.
    """
    options.prepare_compiler(threads)
    from harness.core.processes.memory import hide_torch

    processors = Processors(cpu)
    if minutes is not None and minutes <= 0:
        raise HarnessError(f"--minutes {minutes:g} leaves no time to tune: give more than 0")
    for name in component or ():
        if name in subjects():
            component_of(name, "tune")
    cases = select(component or (), (DEFAULT_STRATEGY,), (HOST.name,), (scale,), precisions=(precision,))
    float32 = options.chosen_groups(budget, cases)
    folder = db or database.TUNED / database.current_conditions(HOST.name, processors).tag
    make_folder(folder, advice=database.ADVICE)
    records = database.Database(folder, HOST.name)
    if (folder / database.FILE).exists():
        records = database.open_database(folder, HOST.name)
    for notice in records.notices(processors):
        print_sentence(f"Note: {notice}")
    hide_torch()  # the process that imports a component needs it, and this one TVM alone
    counts: Counter[Workload] = Counter()
    for case in cases:
        counts += _workloads(case, processors, float32.get(case.component, NO_GROUPS))
    if not counts:
        raise HarnessError(
            f"no kernel of {', '.join(case.component for case in cases)} has a choice of schedules: tune another "
            "component; in half precision, use a CPU that has an instruction for it"
        )
    keys = {workload.key for workload in counts}
    if tuned_before := records.matching_records(processors).keys() & keys:
        print_sentence(f"Continuing in {folder}: {len(tuned_before)} of {len(keys)} kernels were tuned before.")
    deadline = math.inf if minutes is None and trials else time.monotonic() + 60 * (minutes or _DEFAULT_MINUTES)
    count = _search(counts, records, processors, trials, deadline)
    better = database.choose_schedules(folder, HOST.name, processors).schedules.keys() & keys
    summary = f"{len(better)} of {len(keys)} kernels have a better schedule than the default in {folder}"
    print_sentence(f"{count} trials; {summary}.")


def _search(
    counts: Counter[Workload],
    records: database.Database,
    processors: Processors,
    trials: int | None,
    deadline: float,
) -> int:
    """Tries schedules and prints those that are better, until a limit is reached; returns the number of trials."""
    from harness.tuning.search import search

    count = 0
    with progress("trials") as bar, closing(search(counts, records, processors)) as trials_of_kernels:
        line = bar.add_task(f"{len(counts)} kernels", total=trials)
        for trial in trials_of_kernels:
            count += trial.record is not None
            bar.update(line, completed=count, description=trial.task)
            if trial.failure:
                print_sentence(f"Note: {trial.failure}")
            elif trial.record is not None and trial.is_better:
                schedule = ", ".join(f"{name} {value}" for name, value in trial.record.schedule.items())
                print_sentence(f"{trial.task}: {trial.record.gain:.2f} times as fast as the default, with {schedule}")
            if count == trials or time.monotonic() > deadline:
                break
    return count


def _workloads(case: Case, processors: Processors, float32: Groups) -> Counter[Workload]:
    """Returns how often each workload occurs in a component, which is imported in a process of its own.

    Raises:
        HarnessError: The component cannot be imported.
    """
    from harness.core.processes.call import run_isolated

    with running_stage(case.id) as on_stage:
        result = run_isolated("harness.tuning.kernels:count_workloads", case, processors, float32, on_stage=on_stage)
    counts: Counter[Workload] = result.require(f"cannot tune {case.component}")
    return counts

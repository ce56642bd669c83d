"""A tuning session: tasks are collected, schedules are searched, and results are printed, as `sam3-tvm tune` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.processors import THIS_MACHINE, Processors
from harness.files import make_folder
from harness.tuned import database
from harness.tuning.display import (
    Budget,
    describe_progress,
    describe_totals,
    print_line,
    progress_bar,
    results_table,
)
from harness.tuning.request import Request

if TYPE_CHECKING:
    from harness.tuning.measuring import Array
    from harness.tuning.remote import RemoteRunner
    from harness.tuning.tasks import Task

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as shells count."""


def tune(console: Console, request: Request) -> int:
    """Searches for schedules, and prints the progress and the results.

    Returns:
        The exit code: 0, or 130 if the search was interrupted.

    Raises:
        HarnessError: The request makes no sense, there is nothing to tune, or the database cannot be used.
    """
    cases = request.cases()
    conditions = database.current_conditions(request.target, request.processors)
    folder = request.folder or database.TUNED / conditions.tag
    make_folder(folder, advice=database.ADVICE)

    from harness.machine import describe_machine
    from harness.schedules.cpu.tile import vector_unit
    from harness.targets import TARGETS
    from harness.tuned.trials import read_trials
    from harness.tuning.local import LocalBuilder, LocalRunner, TorchRunner
    from harness.tuning.search import Bench, begin, search

    known = (folder / database.FILE).exists()
    opened = database.open_database(folder, request.target) if known else database.Database(folder, request.target)
    trials, notices = read_trials(folder)
    for notice in (*opened.notices(request.processors), *notices):
        print_line(console, f"Note: {notice}")
    target = TARGETS[request.target].tvm_target(request.processors)
    runner: LocalRunner | RemoteRunner = LocalRunner()
    machine = str(describe_machine()["cpu"])
    if request.remote is not None:
        from harness.tuning.remote import RemoteRunner

        # Before any work, because there may be no device.
        runner = RemoteRunner(request.remote)
        machine = f"the device at {request.remote}"
    tasks = _collect_all_tasks(console, cases, request.processors, request.float32)
    states = begin(tasks, vector_unit(target), conditions, trials, opened.records)
    earlier = sum(len(state.trials) for state in states)
    if earlier:
        print_line(console, f"Going on after {earlier} trials in {folder}.")
    interrupted = False
    with ExitStack() as stack:
        builder, torch = LocalBuilder(target), TorchRunner()
        for process in (builder, runner, torch):
            stack.callback(process.close)

        def run_in_torch(task: Task, arrays: Sequence[Path]) -> tuple[float | None, Array]:
            seconds, exact = torch.run(task.workload, arrays)
            # PyTorch runs on this machine, so its time says nothing about the servers.
            return seconds if request.remote is None else None, exact

        bench = Bench(builder, runner, run_in_torch, conditions, folder, machine, request.seed)
        budget = Budget.of(request.minutes, request.trials)
        with progress_bar(console, budget, f"{len(states)} tasks") as advance:
            try:
                for batch in search(
                    states, bench, budget.allows_more, lambda state, _: advance(describe_progress(state))
                ):
                    print_line(console, describe_progress(batch.state))
            except KeyboardInterrupt:
                interrupted = True
    console.print(results_table(states, folder))
    for state in states:
        if state.unmeasurable:
            print_line(console, f"Note: {state.unmeasurable}")
    print_line(console, describe_totals(states))
    if not interrupted:
        return 0
    print_line(console, f"Stopped; what was measured is in {folder}. The same command goes on from there.")
    return INTERRUPTED


def _collect_all_tasks(
    console: Console, cases: Sequence[Case], processors: Processors, float32: Mapping[str, Groups]
) -> list[Task]:
    """Returns the tasks of all components.

    Raises:
        HarnessError: A component cannot be imported, or there is nothing to tune.
    """
    from harness.tuning.tasks import merge_tasks

    found = [collect_tasks(console, case, processors, float32.get(case.component, NO_GROUPS)) for case in cases]
    return merge_tasks(found, ", ".join(case.component for case in cases))


def collect_tasks(
    console: Console, case: Case, processors: Processors = THIS_MACHINE, float32: Groups = NO_GROUPS
) -> list[Task]:
    """Returns the tasks of one component, which is exported and imported in a process of its own.

    In a half precision, products that stay float32 are tasks of that type, and the others of the half type where a
    kernel has an instruction for it.

    Raises:
        HarnessError: The component cannot be imported.
    """
    from harness.processes import WorkerEnd, run_isolated

    text = f"Collecting tasks: {case.component}"
    with console.status(text) as status:
        ended = run_isolated(
            "harness.tuning.tasks:component_tasks",
            (case, processors, float32),
            on_stage=lambda stage: status.update(f"{text} {stage}"),
        )
    if ended.kind is not WorkerEnd.OK:
        reason = ended.error.message.partition("\n")[0] if ended.error else ended.kind.value
        raise HarnessError(f"cannot tune {case.component}: {ended.stage or 'start'}: {reason}")
    tasks: list[Task] = ended.value
    return tasks

"""Displays the stage of each running case, and a line for each finished one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from harness.core.case import Case
from harness.core.names import plural
from harness.core.outcome import Stage, Status
from harness.core.precision import PRECISIONS
from harness.verify.report import Result

STAGES = " → ".join(Stage)


def show_progress(
    console: Console,
    cases: Sequence[Case],
    run: Callable[[Callable[[Case, str], None]], Iterable[Result]],
    on_result: Callable[[Sequence[Result]], object],
) -> list[Result]:
    """Runs cases with live progress, or with one line per case if the output is not a terminal.

    Args:
        console: Console to print to.
        cases: The cases that `run` runs, in order.
        run: Takes the callback for stages, and yields results one by one.
        on_result: Called after each result with all results so far, in the order of the cases.
    """
    results: list[Result] = []
    running: dict[Case, str] = {}
    bar = BarColumn(bar_width=20)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn())
    console.print(f"{plural(len(cases), 'case')}, each: {STAGES}", highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=len(cases))

        def on_stage(case: Case, stage: str) -> None:
            running[case] = f"{case.id} [bold]{stage}[/bold]"
            progress.update(task, description=", ".join(running.values()))

        for result in run(on_stage):
            running.pop(result.case, None)
            results.append(result)
            results.sort(key=lambda result: cases.index(result.case))
            console.print(result_line(result), markup=True, highlight=False, soft_wrap=True)
            progress.advance(task)
            on_result(results)
    return results


def result_line(result: Result) -> str:
    """Describes a finished case: its check, status, accuracy and duration."""
    outcome = result.outcome
    mark = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "[yellow]–[/yellow]"}[result.expected]
    status = f"{outcome.status.value.replace('_', ' ')} at {outcome.stage}"
    if result.expected and outcome.status is not Status.PASSED:
        status += ", as predicted"
    if outcome.emulated:
        status += ", emulated"
    seconds = f"{sum(outcome.seconds.values()):.0f} s"
    text = f"{mark} {result.case.id:48} {status:32} {seconds:>6}"
    ratios = [verdict.r_rms for verdict in outcome.verdicts if not math.isnan(verdict.r_rms)]
    if ratios:
        outside = sum(verdict.outside for verdict in outcome.verdicts)
        by_oracle = PRECISIONS[result.case.precision].judged_by_oracle
        text += f"  {'' if by_oracle else f'{outside} elements outside, '}r_rms {max(ratios):.2f}"
    if not result.expected:
        text += f"\n    {escape(result.problem)}"
    return text


def diagnosis_sentence(result: Result) -> str:
    """Returns which kernel of a case diverges, or why that is unknown; empty without a diagnosis."""
    if result.not_diagnosed:
        return f"{result.case.id}: not diagnosed: {result.not_diagnosed}"
    return f"{result.case.id}: {result.diagnosis['told']}" if result.diagnosis else ""

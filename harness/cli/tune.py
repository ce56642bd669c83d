"""Defines `sam3-tvm tune`: searches for better schedules and stores them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import console
from harness.cli.installation import require_compiler
from harness.cli.options import (
    BudgetOption,
    CpuOption,
    RemoteOption,
    ThreadsOption,
    check_number,
    chosen_groups,
)
from harness.core.budget import read_budgets
from harness.core.case import Scale
from harness.core.errors import HarnessError
from harness.core.processors import Processors
from harness.core.remote import Remote
from harness.targets import HOST, TARGETS
from harness.tuning.request import Request


def tune_command(
    component: Annotated[list[str] | None, typer.Option(help="Component; repeat for several. Default: all.")] = None,
    target: Annotated[
        str,
        typer.Option(help=f"Target: {', '.join(target.name for target in TARGETS.values() if target.tunable)}."),
    ] = HOST.name,
    scale: Annotated[str, typer.Option(help="shallow or full: how often each kernel counts.")] = Scale.SHALLOW.value,
    precision: Annotated[
        str | None, typer.Option(help="Precision of what is tuned. Default: fp32, or that of the budgets.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(callback=check_number, help="When to stop. Default: 10, or when --trials says so.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Schedules to try at most.")] = None,
    db: Annotated[
        Path | None, typer.Option(help="Folder of the database. Default: this machine's in fixtures/tuned.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of candidates and inputs.")] = 0,
    budget: BudgetOption = None,
    remote: RemoteOption = None,
    threads: ThreadsOption = None,
    cpu: CpuOption = None,
) -> None:
    """Search for better schedules, and store them in a database that verify and compile use.

    Ctrl-C stops the search; the same command continues it.
    """
    require_compiler()
    from harness.processes.threads import configure_threads
    from harness.tuning.session import tune

    configure_threads(threads)
    device = None if remote is None else Remote(remote)
    request = Request(tuple(component or ()), target, scale, minutes, trials, db, seed, device, Processors(cpu))
    request = replace(request, precision=precision or request.precision)
    if budget:
        request = _add_budgets(request, budget, precision)
    code = tune(console, request)
    if code:
        raise typer.Exit(code)


def _add_budgets(request: Request, files: Sequence[Path], precision: str | None) -> Request:
    """Returns the request with the groups of products that stay float32 in half precision.

    Raises:
        HarnessError: A file is not a budget, or is for something else than the request.
    """
    budgets = read_budgets(files).values()
    precisions = {budget.precision for budget in budgets}
    if len(precisions) > 1:
        raise HarnessError(f"the budgets are for {' and '.join(sorted(precisions))}: tune for one of them")
    if precision is not None and {precision} != precisions:
        raise HarnessError(f"the budgets are for {precisions.pop()}, and --precision is {precision}")
    components = request.components or tuple(budget.component for budget in budgets)
    completed = replace(request, components=components, precision=precisions.pop())
    return replace(completed, float32=chosen_groups(files, completed.cases()))

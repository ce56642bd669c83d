"""Defines `sam3-tvm diagnose`: finds the kernel that is wrong, or the kernels that make most of the error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options
from harness.cli.console import console, print_sentence, running_stage
from harness.compiler.targets import HOST
from harness.core.budget import NO_GROUPS
from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, Scale
from harness.core.files import check_writable, write_json
from harness.core.precision import DEFAULT_PRECISION
from harness.core.processors import Processors
from harness.core.settings import Settings
from harness.models.selection import select

NOT_REPRODUCED = 3
"""Exit code if a kernel diverges, and no smaller program reproduces that."""


def diagnose(
    component: Annotated[list[str] | None, typer.Option(help="Component; repeat for several. Default: all.")] = None,
    strategy: Annotated[str, typer.Option(help="RoPE strategy.")] = DEFAULT_STRATEGY,
    target: Annotated[str, typer.Option(help="Target; its kernels must run on this CPU.")] = HOST.name,
    scale: Annotated[str, typer.Option(help="shallow or full.")] = Scale.SHALLOW.value,
    precision: Annotated[str, typer.Option(help="Precision; causes are looked for in fp32.")] = DEFAULT_PRECISION,
    frontend: Annotated[str, typer.Option(help="Frontend; its nodes must be torch.export's.")] = DEFAULT_FRONTEND,
    output: Annotated[str | None, typer.Option(help="Follow this output alone. Default: all of them.")] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every boundary, not only those that matter most.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for everything that was found.")] = None,
    reproduce: Annotated[
        Path | None, typer.Option(help="New folder that shows the first divergent kernel with TVM alone.")
    ] = None,
    budget: options.BudgetOption = None,
    seed: options.SeedOption = 0,
    weights: options.WeightsOption = None,
    checkpoint: options.CheckpointOption = None,
    allow_partial: options.PartialOption = False,
    db: options.DatabaseOption = None,
    untuned: options.UntunedOption = False,
    cpu: options.CpuOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Compare every kernel with PyTorch and float64, and name the first that diverges.

    Exit code 0: every kernel rounds like PyTorch. 1: a kernel or an output exceeds the limits, or memory is reused too
    early. 2: wrong usage or environment. 3: a kernel diverges, and no folder of --reproduce shows that.
    """
    options.prepare_compiler(threads)
    from harness.core.expectations import expectation_for
    from harness.verify.diagnose.report import check_folder, document, render, summary, write_folder
    from harness.verify.runner import diagnose_case, expectations

    distributions = options.chosen_weights(weights, checkpoint)
    cases = select(component or (), (strategy,), (target,), (scale,), seed, (precision,), (frontend,), distributions)
    float32 = options.chosen_groups(budget, cases)
    if reproduce is not None:
        check_folder(reproduce, len(cases))
    if json_file is not None:
        check_writable(json_file, advice=options.JSON_ADVICE)
    processors = Processors(cpu)
    database = options.chosen_database(db, untuned, {target}, processors)
    settings = Settings(checkpoint, allow_partial, database=database, processors=processors)
    diagnoses = []
    for case in cases:
        groups = float32.get(case.component, NO_GROUPS)
        settings = replace(settings, expectation=expectation_for(case, expectations()), float32=groups)
        with running_stage(case.id) as on_stage:
            diagnosis = diagnose_case(case, settings, output, on_stage, reproduce=reproduce is not None)
        console.print(render(diagnosis, show_all))
        print_sentence(summary(diagnosis))
        diagnoses.append(diagnosis)
    if json_file is not None:
        documents = [document(diagnosis) for diagnosis in diagnoses]
        write_json(json_file, {"schema": 1, "cases": documents}, advice=options.JSON_ADVICE)
    if reproduce is not None:
        (diagnosis,) = diagnoses
        print_sentence(write_folder(diagnosis, reproduce))
        if diagnosis.reproduction is not None and not diagnosis.reproduction.files:
            raise typer.Exit(NOT_REPRODUCED)
    if any(diagnosis.faulty for diagnosis in diagnoses):
        raise typer.Exit(1)

"""Defines `sam3-tvm explain`: shows how each operator is lowered."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options
from harness.cli.console import console, print_sentence, running_stage
from harness.compiler.targets import HOST
from harness.core.budget import NO_GROUPS
from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, Scale
from harness.core.errors import HarnessError
from harness.core.files import check_writable, make_folder, write_json
from harness.core.precision import DEFAULT_PRECISION
from harness.core.processors import Processors
from harness.core.settings import Settings
from harness.models.selection import select


def explain(
    component: Annotated[list[str] | None, typer.Option(help="Component; repeat for several. Default: all.")] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"RoPE strategy; repeatable. Default: {DEFAULT_STRATEGY}.")
    ] = None,
    target: Annotated[str, typer.Option(help="Target to lower for.")] = HOST.name,
    scale: Annotated[str, typer.Option(help="shallow or full.")] = Scale.SHALLOW.value,
    precision: Annotated[str, typer.Option(help="Precision to lower in.")] = DEFAULT_PRECISION,
    frontend: Annotated[str, typer.Option(help="Frontend to import through.")] = DEFAULT_FRONTEND,
    budget: options.BudgetOption = None,
    weights: options.WeightsOption = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="JSON file with every call of every operator, in full.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Folder for each exported program (.pt2) and its Relax module as text.")
    ] = None,
    db: options.DatabaseOption = None,
    untuned: options.UntunedOption = False,
    cpu: options.CpuOption = None,
    cuda_arch: options.CudaArchOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Show how each operator is lowered: to a kernel, to scheduled loops, or to TVM's default.

    The command exports, imports and lowers each component for its main inputs; nothing is run.
    """
    options.prepare_compiler(threads)
    from harness.compiler.lowering.frontends import EXPORTING_PROGRAMS
    from harness.verify.explain import document, render, summary
    from harness.verify.explain import explain as explain_case

    distributions = options.chosen_weights(weights, None)
    cases = select(
        component or (),
        strategy or (DEFAULT_STRATEGY,),
        (target,),
        (scale,),
        precisions=(precision,),
        frontends=(frontend,),
        weights=distributions,
    )
    float32 = options.chosen_groups(budget, cases)
    if json_file is not None:
        check_writable(json_file, advice=options.JSON_ADVICE)
    if save is not None:
        if frontend not in EXPORTING_PROGRAMS:
            raise HarnessError(f"--save takes exported programs: choose --frontend {' or '.join(EXPORTING_PROGRAMS)}")
        make_folder(save, advice="choose another folder with --save")
    processors = Processors(cpu, cuda_arch)
    database = options.chosen_database(db, untuned, {target}, processors)
    explanations = []
    for case in cases:
        groups = float32.get(case.component, NO_GROUPS)
        settings = Settings(database=database, processors=processors, float32=groups)
        with running_stage(case.id) as on_stage:
            explanation = explain_case(case, settings, save, on_stage)
        console.print(render(explanation))
        print_sentence(summary(explanation))
        explanations.append(explanation)
    if json_file is not None:
        documents = [document(explanation) for explanation in explanations]
        write_json(json_file, {"schema": 1, "cases": documents}, advice=options.JSON_ADVICE)
    if save is not None:
        print_sentence(f"Programs and modules: {save}")

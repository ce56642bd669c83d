"""Defines `sam3-tvm compile`: compiles the whole model into a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import console, print_artifact, stages
from harness.cli.installation import require_compiler
from harness.cli.options import (
    BudgetOption,
    CheckpointOption,
    CpusOption,
    CudaArchOption,
    DatabaseOption,
    PartialOption,
    SeedOption,
    ThreadsOption,
    UntunedOption,
    WeightsOption,
    chosen_database,
    chosen_deployable,
    chosen_weights,
)
from harness.compiler.deployment.deployable import ModelOptions
from harness.compiler.lowering.frontends import FRONTENDS
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.schedules import ChosenSchedules
from harness.compiler.targets import HOST, TARGETS
from harness.compiler.tuned import database
from harness.core.budget import NO_GROUPS, read_budgets
from harness.core.case import DEFAULT_FRONTEND, DEFAULT_STRATEGY, TINY, Case, Scale
from harness.core.names import select_names
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.core.processors import Processors
from harness.core.settings import Settings
from harness.models.registry import DEFAULT_MODEL


def compile_(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder to write; a compiled model that is there is replaced.")],
    target: Annotated[str, typer.Option(help="Target to compile for.")] = HOST.name,
    scale: Annotated[str, typer.Option(help="shallow or full; tiny for tests.")] = Scale.FULL.value,
    strategy: Annotated[str, typer.Option(help="RoPE strategy.")] = DEFAULT_STRATEGY,
    precision: Annotated[
        str, typer.Option(help=f"{', '.join(PRECISIONS)}: weights and operands of products; fp16 on GPUs only.")
    ] = DEFAULT_PRECISION,
    frontend: Annotated[str, typer.Option(help=f"{', '.join(FRONTENDS)}: what imports the model.")] = DEFAULT_FRONTEND,
    budget: BudgetOption = None,
    model: Annotated[str, typer.Option(help="Name of the model.")] = DEFAULT_MODEL,
    checkpoint: CheckpointOption = None,
    allow_partial: PartialOption = False,
    seed: SeedOption = 0,
    weights: WeightsOption = None,
    db: DatabaseOption = None,
    untuned: UntunedOption = False,
    cpu: CpusOption = None,
    cuda_arch: CudaArchOption = None,
    threads: ThreadsOption = None,
) -> None:
    """Compile the whole model into a folder that runs without PyTorch."""
    require_compiler()
    from harness.compiler.deployment.compiling import compile_model
    from harness.compiler.deployment.variants import check_variants
    from harness.core.processes.threads import configure_threads

    configure_threads(threads)
    for kind, name, known_names in (
        ("target", target, TARGETS),
        ("scale", scale, [*Scale, TINY]),
        ("strategy", strategy, STRATEGIES),
        ("precision", precision, PRECISIONS),
        ("frontend", frontend, FRONTENDS),
    ):
        select_names(kind, (name,), tuple(known_names))
    cpus = tuple(cpu or ())
    if len(cpus) > 1:
        check_variants(target, cpus)
    tuned = {name: _schedules(target, Processors(name, cuda_arch), db, untuned) for name in cpus or (None,)}
    deployable = chosen_deployable(model)
    (distribution,) = chosen_weights((weights,) if weights else (), checkpoint, deployable.weights)
    case = Case(deployable.model, strategy, target, scale, seed, precision, frontend, distribution)
    budgets = read_budgets(budget or ())
    for file, item in budgets.items():
        item.check_fits(case, deployable.model, file)
    first_cpu, schedules = next(iter(tuned.items()))
    variants = {name: chosen for name, chosen in tuned.items() if name is not None} if len(cpus) > 1 else None
    processors = Processors(first_cpu, cuda_arch)
    settings = Settings(checkpoint=checkpoint, allow_partial=allow_partial, processors=processors)
    given: ModelOptions = context.obj
    options = given.fit(case, settings, lambda note: console.print(f"Note: {note}", soft_wrap=True))
    with stages(f"Compiling for {target}") as on_stage:
        float32 = NO_GROUPS.union(*(item.float32 for item in budgets.values()))
        manifest = compile_model(deployable, case, out, settings, options, schedules, on_stage, float32, variants)
    print_artifact(out, manifest, options.summary())


def _schedules(target: str, processors: Processors, db: Path | None, untuned: bool) -> ChosenSchedules:
    return database.choose_schedules(chosen_database(db, untuned, {target}, processors), target, processors)

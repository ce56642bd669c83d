"""Defines `sam3-tvm compile`, which takes the options of a model besides its own: compiles the model into a folder."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from harness.cli import options
from harness.cli.console import console, print_artifact, stages
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
from harness.models.registry import DEFAULT_MODEL, models


class ModelCommand(TyperCommand):
    """A command with `--model`, whose context's `obj` gets the `ModelOptions` of that model.

    Without `--model` it is the model that the checkpoint is of, or the default one.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._own, self._options = self.params, ModelOptions

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Adds the options of the model that the arguments name, then parses them."""
        name, checkpoint = _value("--model", args), _value("--checkpoint", args)
        if name is None and checkpoint is not None and Path(checkpoint).exists():
            options.require_compiler()
            name = options.model_of(Path(checkpoint))
            args = ["--model", name, *args]
        model = models().get(name or DEFAULT_MODEL)
        deployable = None if model is None else model.deployable
        self._options = ModelOptions if deployable is None else deployable.options
        self.params = [*self._own, *_parameters(self._options)]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Calls the command with the values of its own options."""
        added = {parameter.name for parameter in self.params} - {parameter.name for parameter in self._own}
        ctx.obj = self._options(**{name: ctx.params.pop(name) for name in added})
        return super().invoke(ctx)


def _value(flag: str, arguments: list[str]) -> str | None:
    """Returns the last value of an option among the arguments of a command; None if it is not given."""
    values = [word for before, word in pairwise(["", *arguments]) if before == flag or word.startswith(f"{flag}=")]
    return values[-1].removeprefix(f"{flag}=") if values else None


def _parameters(model_options: type[ModelOptions]) -> list[Any]:
    """Returns a model's options as parameters of a command."""
    app = typer.Typer(add_completion=False)
    app.command()(model_options)
    return list(typer.main.get_command(app).params)


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
    budget: options.BudgetOption = None,
    model: Annotated[
        str, typer.Option(help="Name of the model.", show_default="the checkpoint's, or sam3")
    ] = DEFAULT_MODEL,
    checkpoint: options.CheckpointOption = None,
    allow_partial: options.PartialOption = False,
    seed: options.SeedOption = 0,
    weights: options.WeightsOption = None,
    db: options.DatabaseOption = None,
    untuned: options.UntunedOption = False,
    cpu: options.CpusOption = None,
    cuda_arch: options.CudaArchOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Compile the whole model into a folder that runs without PyTorch."""
    options.prepare_compiler(threads)
    from harness.compiler.deployment.compiling import FolderSchedules, check_variants, compile_model
    from harness.compiler.deployment.deployable import ArtifactSpec

    for kind, name, known_names in (
        ("target", target, TARGETS),
        ("scale", scale, [*Scale, TINY]),
        ("strategy", strategy, STRATEGIES),
        ("precision", precision, PRECISIONS),
        ("frontend", frontend, FRONTENDS),
    ):
        select_names(kind, (name,), tuple(known_names))
    cpus = tuple(cpu or ())
    processors = Processors(cpus[0] if cpus else None, cuda_arch)
    schedules: FolderSchedules
    if len(cpus) > 1:
        check_variants(target, cpus)
        schedules = {name: _schedules(target, Processors(name, cuda_arch), db, untuned) for name in cpus}
    else:
        schedules = _schedules(target, processors, db, untuned)
    deployable = options.chosen_deployable(model)
    (distribution,) = options.chosen_weights(weights, checkpoint, deployable.weights)
    abilities = options.print_checkpoint(deployable.model, checkpoint)
    case = Case(deployable.model, strategy, target, scale, seed, precision, frontend, distribution)
    budgets = read_budgets(budget or ())
    for file, item in budgets.items():
        item.check_fits(case, deployable.model, file)
    settings = Settings(
        checkpoint,
        allow_partial,
        processors=processors,
        abilities=abilities,
        float32=NO_GROUPS.union(*(item.float32 for item in budgets.values())),
    )
    given: ModelOptions = context.obj
    model_options = given.fit(case, settings, lambda note: console.print(f"Note: {note}", soft_wrap=True))
    with stages(f"Compiling for {target}") as on_stage:
        spec = ArtifactSpec(deployable, case, settings, model_options)
        manifest = compile_model(spec, out, schedules, on_stage)
    print_artifact(out, manifest, model_options.summary())


def _schedules(target: str, processors: Processors, db: Path | None, untuned: bool) -> ChosenSchedules:
    return database.choose_schedules(options.chosen_database(db, untuned, {target}, processors), target, processors)

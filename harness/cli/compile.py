"""`sam3-tvm compile`: the whole model, in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import stages, tell_artifact
from harness.cli.installation import require_compiler
from harness.cli.options import (
    CheckpointOption,
    DatabaseOption,
    PartialOption,
    SeedOption,
    UntunedOption,
    chosen_database,
)
from harness.core.case import DEFAULT_STRATEGY, Scale, checked
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.lowering.rope import STRATEGIES
from harness.runtime.manifest import DEFAULT_CAPACITY, Capacity
from harness.targets import TARGETS


def compile_(
    out: Annotated[Path, typer.Option(help="Folder to write; a compiled model that is there is replaced.")],
    target: Annotated[str, typer.Option(help="Target to compile for.")] = "llvm",
    scale: Annotated[str, typer.Option(help="shallow or full.")] = Scale.FULL.value,
    strategy: Annotated[str, typer.Option(help="RoPE strategy.")] = DEFAULT_STRATEGY,
    precision: Annotated[
        str, typer.Option(help=f"{', '.join(PRECISIONS)}: weights and operands of products, on GPUs.")
    ] = DEFAULT_PRECISION,
    checkpoint: CheckpointOption = None,
    allow_partial: PartialOption = False,
    seed: SeedOption = 0,
    points: Annotated[int, typer.Option(min=1, help="Most points in one prompt.")] = DEFAULT_CAPACITY.points,
    boxes: Annotated[int, typer.Option(min=1, help="Most boxes in one prompt.")] = DEFAULT_CAPACITY.boxes,
    db: DatabaseOption = None,
    untuned: UntunedOption = False,
) -> None:
    """Compile the whole model into a folder that runs without PyTorch."""
    require_compiler()
    from harness.deployment.compiling import Model, compile_model

    for kind, name, known in (
        ("target", target, TARGETS),
        ("scale", scale, [entry.value for entry in Scale]),
        ("strategy", strategy, STRATEGIES),
        ("precision", precision, PRECISIONS),
    ):
        checked(kind, (name,), tuple(known))
    chosen = chosen_database(db, untuned, {target})
    model = Model(scale, strategy, seed, checkpoint, allow_partial, Capacity(points, boxes), chosen, precision)
    with stages(f"Compiling for {target}") as announce:
        manifest = compile_model(model, target, out, announce)
    tell_artifact(out, manifest)

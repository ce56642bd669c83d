"""Defines `sam3-tvm pack`: gives other weights to a compiled model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options
from harness.cli.console import print_artifact, stages
from harness.core.settings import Settings
from harness.runtime.manifest import read_any_manifest


def pack(
    into: Annotated[Path, typer.Option(help="Compiled model that gets other weights.")],
    checkpoint: options.CheckpointOption = None,
    allow_partial: options.PartialOption = False,
    seed: options.SeedOption = 0,
    weights: options.WeightsOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Put other weights of the same shapes into a compiled model, without compiling it again."""
    options.prepare_compiler(threads)
    from harness.compiler.deployment.packing import pack_model

    deployable = options.chosen_deployable(read_any_manifest(into).model)
    (distribution,) = options.chosen_weights(weights, checkpoint, deployable.weights)
    abilities = options.print_checkpoint(deployable.model, checkpoint)
    with stages(f"Packing into {into}") as on_stage:
        settings = Settings(checkpoint=checkpoint, allow_partial=allow_partial, abilities=abilities)
        manifest = pack_model(deployable, into, settings, seed, on_stage, distribution)
    print_artifact(into, manifest, deployable.options.read(into, manifest).summary())

"""Defines `sam3-tvm budget`: measures the error that each group of products adds, and chooses which stay float32."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options
from harness.cli.console import console, print_sentence, running_stage
from harness.compiler.targets import HOST
from harness.core.case import DEFAULT_STRATEGY, Scale
from harness.core.files import check_writable, make_folder, write_json
from harness.core.precision import PRECISIONS
from harness.core.processors import Processors
from harness.core.settings import Settings
from harness.models.selection import select

FP32_RATE, HALF_RATE = 220.0, 420.0
"""GFLOP/s of a thread of a Zen 5 core with `vdpbf16ps` (docs/evidence/log/2026-11-30-precision.md)."""

_HALVES = ", ".join(name for name, precision in PRECISIONS.items() if precision.is_half)


def budget_command(
    component: Annotated[str, typer.Option(help="Component.")],
    limit: Annotated[
        float, typer.Option(help="Largest error of every output: its rms against float64, divided by that of autocast.")
    ],
    precision: Annotated[str, typer.Option(help=f"Half precision: {_HALVES}.")] = "bf16",
    target: Annotated[str, typer.Option(help="Target; its code must run here.")] = HOST.name,
    scale: Annotated[str, typer.Option(help="shallow or full.")] = Scale.SHALLOW.value,
    strategy: Annotated[str, typer.Option(help="RoPE strategy.")] = DEFAULT_STRATEGY,
    fp32_rate: Annotated[
        float, typer.Option(callback=options.check_number, help="GFLOP/s of products in fp32, to count time with.")
    ] = FP32_RATE,
    half_rate: Annotated[
        float, typer.Option(callback=options.check_number, help="GFLOP/s of products in half precision.")
    ] = HALF_RATE,
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: reports/budget/COMPONENT-SCALE-TARGET-PRECISION.json.")
    ] = None,
    seed: options.SeedOption = 0,
    weights: options.WeightsOption = None,
    checkpoint: options.CheckpointOption = None,
    allow_partial: options.PartialOption = False,
    db: options.DatabaseOption = None,
    untuned: options.UntunedOption = False,
    cpu: options.CpuOption = None,
    threads: options.ThreadsOption = None,
) -> None:
    """Measure the error that each group of products adds, and choose which stay float32 for the least time.

    Compile, verify and tune read the file with --budget. Ctrl-C stops the command; the same command continues, and with
    another limit it reuses the measurements.
    """
    options.prepare_compiler(threads)
    from harness.verify.budget.search import ADVICE, Rates, find_budget
    from harness.verify.budget.table import front_table, groups_table, summary

    distributions = options.chosen_weights(weights, checkpoint)
    (case,) = select((component,), (strategy,), (target,), (scale,), seed, (precision,), weights=distributions)
    file = out or Path("reports/budget") / f"{component}-{scale}-{target}-{precision}.json"
    if out is None:
        make_folder(file.parent, advice=ADVICE)
    check_writable(file, advice=ADVICE)
    processors = Processors(cpu)
    database = options.chosen_database(db, untuned, {target}, processors)
    settings = Settings(checkpoint, allow_partial, database=database, processors=processors)
    log = file.with_suffix(".measurements.jsonl")
    with running_stage(case.id) as on_stage:
        result = find_budget(case, settings, limit, Rates(fp32_rate, half_rate), log, on_stage)
    write_json(file, result.to_json(), advice=ADVICE)
    console.print(groups_table(result))
    console.print(front_table(result))
    print_sentence(summary(result))
    print_sentence(f"Budget: {file}; measurements: {log}")

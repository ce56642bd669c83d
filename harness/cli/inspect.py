"""Defines `sam3-tvm inspect`: tells what a checkpoint is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table
from rich.text import Text

from harness.cli import options
from harness.cli.console import console, print_sentence, running_stage
from harness.core.errors import HarnessError
from harness.core.files import check_writable, write_json
from harness.core.names import select_names
from harness.models.registry import models


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="File of weights, index of several, or folder of one of these.")],
    model: Annotated[str | None, typer.Option(help="Name of the model. Default: the first that takes it.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="JSON file with all that is known, and every tensor's name.")
    ] = None,
) -> None:
    """Tell what a checkpoint is: its layout, what it fits, dtypes, size, SHA-256, and what it can do."""
    options.require_compiler()
    model = model or options.model_of(checkpoint)
    select_names("model", (model,), tuple(models()))
    inspect_checkpoint = models()[model].inspect_checkpoint
    if inspect_checkpoint is None:
        raise HarnessError(f"the model {model} takes no checkpoints: choose another --model")
    if json_file is not None:
        check_writable(json_file)
    with running_stage(f"Reading {checkpoint.name}"):
        facts = inspect_checkpoint(checkpoint)
    print_sentence(facts["checkpoint"])
    console.print(render(facts))
    if json_file is not None:
        write_json(json_file, facts)


def render(facts: Mapping[str, Any]) -> Table:
    """Builds a table for the terminal (rich): lists are shown by their beginnings, and what is empty is left out."""
    table = Table("what", Column("found", overflow="fold"), highlight=False)
    for name, value in facts.items():
        if name != "checkpoint" and value not in (None, "", [], {}):
            table.add_row(Text(name), Text(_cell(value)))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {number}" for name, number in value.items())
    if isinstance(value, list):
        return ", ".join(value[:5]) + (f", … ({len(value)})" if len(value) > 5 else "")
    return f"{value:,}".replace(",", " ") if isinstance(value, int) else str(value)

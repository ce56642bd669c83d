"""Defines `sam3-tvm doctor`: tells what this machine can compile and run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from harness.cli import options
from harness.cli.console import console
from harness.core.processors import Processors

if TYPE_CHECKING:
    from harness.compiler.doctor.diagnosis import Finding


def doctor(
    cpu: options.CpuOption = None, cuda_arch: options.CudaArchOption = None, threads: options.ThreadsOption = None
) -> None:
    """Tell what this machine can compile and run, and name known-bad versions with the fix.

    Exit code 0: nothing has to be fixed. 1: something has to be.
    """
    from harness.compiler.doctor.diagnosis import diagnose
    from harness.core.processes.threads import choose_threads

    choose_threads(threads)
    findings = diagnose(Processors(cpu, cuda_arch))
    console.print(render(findings))
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


def render(findings: Sequence[Finding]) -> Table:
    """Builds a table for the terminal (rich) that marks problems and shows their fixes."""
    table = Table("", "topic", "finding", show_lines=False, highlight=False)
    for finding in findings:
        text = finding.text + (f"\nfix: {finding.fix}" if finding.fix else "")
        style = "red" if finding.problem else ""
        table.add_row(Text("!" if finding.problem else "", style=style), finding.topic, Text(text, style=style))
    return table

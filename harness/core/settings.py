"""Settings: everything that a verification depends on besides the identity of its cases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.processors import THIS_MACHINE, Processors
from harness.core.remote import Remote

if TYPE_CHECKING:
    from harness.core.expectations import Expectation

REPOSITORY = Path(__file__).resolve().parents[2]
"""The checkout: harness/ and fixtures/ lie in it."""


@dataclass(frozen=True)
class Settings:
    """Weights, inputs, expectation, whether to run at all, and where.

    Attributes:
        checkpoint: Weights file; None for seeded weights.
        allow_partial: Whether a checkpoint may lack parameters.
        expectation: The expectation that names the case, if there is one.
        image: Photograph to capture the inputs from; None for the one in fixtures/.
        database: Folder of a tuning database whose schedules to compile with; None for the default schedules.
        judge_saved: Whether to judge the outputs that the last run saved instead of compiling and running.
        remote: The device to run on; None for this machine.
        emulate: Whether every component's GPU kernels run on the CPU where there is no device, and not only the cheap
            ones, and code for AMX on a CPU without it; it takes minutes.
        processors: The processors that code is compiled for.
        model: Folder of a compiled model, which cases of whole models judge instead of compiling one of their own.
    """

    checkpoint: Path | None = None
    allow_partial: bool = False
    expectation: Expectation | None = None
    image: Path | None = None
    judge_saved: bool = False
    database: Path | None = None
    remote: Remote | None = None
    emulate: bool = False
    processors: Processors = THIS_MACHINE
    model: Path | None = None


SEEDED = Settings()
"""Seeded weights, the default inputs and the default schedules."""

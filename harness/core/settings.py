"""Defines the settings: everything that a verification depends on besides the identity of its cases."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.budget import NO_GROUPS, Groups
from harness.core.processors import THIS_MACHINE, Processors, Remote

if TYPE_CHECKING:
    from harness.core.expectations import Expectation

REPOSITORY = Path(__file__).resolve().parents[2]
"""The checkout, which contains harness/ and docs/."""
FIXTURES = (Path(__file__).parents[1] / "fixtures").resolve()
"""The photographs, questions, expectations and tuning databases: the checkout's fixtures/, or their copy in a wheel."""


@dataclass(frozen=True)
class Settings:
    """Weights, inputs, expectation and devices of a verification.

    Attributes:
        checkpoint: Weights file; None for seeded weights.
        allow_partial: Whether a checkpoint may lack parameters.
        expectation: The expectation that names the case, if any.
        image: Photograph that the inputs are captured from; None for the one in fixtures/.
        database: Folder of the tuning database with the schedules; None for the default schedules.
        judge_saved: Whether to judge the outputs that the last run saved instead of compiling and running.
        remote: Device that runs the case; None for this machine.
        emulate: Whether the CPU emulates the GPU kernels of every component if there is no device, not only the cheap
            ones, and AMX if it lacks AMX; this takes minutes.
        processors: The processors that code is compiled for.
        model: Folder of a compiled model, which cases of whole models judge instead of compiling a model.
        abilities: What the checkpoint's description says that it can do; empty if nobody has described it.
        questions: Names of the questions that a whole model is asked; empty for all.
        float32: Groups of products that stay float32 in half precision.
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
    abilities: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    float32: Groups = NO_GROUPS


SEEDED = Settings()
"""Seeded weights, the default inputs and the default schedules."""

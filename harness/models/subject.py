"""Defines a subject of cases, which has programs and a trace of calls that holds its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from harness.compiler.deployment.deployable import ModelOptions
from harness.core.case import Case, Weights
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.precision import PRECISIONS
from harness.core.program import Program
from harness.core.settings import Settings

if TYPE_CHECKING:
    from harness.compiler.execution.run import Run


class Workload(Protocol):
    """A subject whose model has been built for one case."""

    @property
    def programs(self) -> Mapping[str, Program]:
        """Returns the entry points by name; the first is the main one."""

    def run(self, run: Run) -> bool:
        """Compiles the programs and runs the trace; returns False if the compiled code cannot be run here."""

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Returns the verdicts on the outputs of the last run, in this process or an earlier one."""


@dataclass(frozen=True)
class Subject:
    """The subject of cases: a component or a whole model.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        inputs: Names of the inputs.
        outputs: Names of the outputs that are judged.
        open: Builds the model for a case and returns the workload; called inside the model's context.
        model: Name of the model that the subject belongs to.
        uses_rope: Whether the subject has rotary position encoding; if not, only the default strategy applies.
        whole: Whether the subject is a whole model, which a list of all components leaves out.
        long: Whether verification takes so long that the subject is verified only where it is named.
        symbolic: Whether inputs have symbolic axes, which some targets, frontends and strategies do not take.
        precisions: Names of the precisions in which the subject can be judged.
        weights: Names of the distributions that its weights can be drawn from.
        options: The options that a whole model is compiled with; a folder is judged whose own include them.
        emulated: Names of the precisions in which the GPU kernels are cheap enough to be emulated without `--emulate`.
    """

    name: str
    summary: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    open: Callable[[Case, Settings], Workload]
    model: str
    uses_rope: bool = False
    whole: bool = False
    long: bool = False
    symbolic: bool = False
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    weights: tuple[str, ...] = (Weights.SEEDED.value,)
    options: ModelOptions = field(default_factory=ModelOptions)
    emulated: tuple[str, ...] = ()

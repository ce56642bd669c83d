"""Subject: what a case is about. It has programs, and a trace of calls of them that holds its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.precision import PRECISIONS
from harness.core.program import Program
from harness.core.settings import Settings
from harness.core.weights import Weights
from harness.runtime.manifest import DEFAULT_CAPACITY, Capacity

if TYPE_CHECKING:
    from harness.execution.run import Run


class Workload(Protocol):
    """A subject whose model has been built for one case."""

    @property
    def programs(self) -> Mapping[str, Program]:
        """The entry points by name; the first is the main one."""

    def run(self, run: Run) -> bool:
        """Compiles it and runs it; False if it was compiled and cannot be run here."""

    def judge(self, expectation: Expectation | None) -> tuple[Verdict, ...]:
        """Returns the verdicts on what the last run returned, this one's or an earlier one's."""


@dataclass(frozen=True)
class Subject:
    """The subject of cases: a component or a whole model.

    Attributes:
        name: Registry key, also the pytest marker.
        summary: One line for `sam3-tvm list`.
        inputs: Names of what goes in.
        outputs: Names of what is judged.
        open: Builds the model for a case and returns the workload; called inside the model's context.
        model: Name of the model that it is of.
        uses_rope: Whether rotary position encoding is inside; if not, only the default strategy applies.
        whole: Whether it is a whole model, which no list of all components means.
        long: Whether it takes so long that it is verified only where it is named.
        symbolic: Whether inputs have symbolic axes, which not every target, frontend and strategy takes.
        precisions: Names of the precisions in which it can be judged.
        weights: What its weights can be drawn by.
        capacity: Of a whole model: what a compiled model must answer to be judged.
        emulated: Names of the precisions in which its GPU kernels are cheap enough to be emulated without being asked.
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
    capacity: Capacity = DEFAULT_CAPACITY
    emulated: tuple[str, ...] = ()

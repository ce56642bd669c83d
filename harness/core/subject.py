"""Subject: what a case is about. It has programs, and a trace of calls of them that holds its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from harness.core.case import Case
from harness.core.expectations import Expectation
from harness.core.outcome import Verdict
from harness.core.precision import PRECISIONS
from harness.core.settings import Settings
from harness.core.weights import Weights

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from harness.execution.run import Run

Arrays = dict[str, "npt.NDArray[Any]"]
"""Arrays by name."""


@dataclass(frozen=True)
class Axis:
    """The extent of an input that is not known when a program is compiled; axes of one name have one extent.

    Attributes:
        name: A Python identifier.
        least: The smallest extent, at least 1.
        most: The largest extent.
    """

    name: str
    least: int
    most: int


Symbolic = Mapping[str, Mapping[int, Axis]]
"""By the name of an input: its axes whose extents are not known when it is compiled, by their numbers."""


@dataclass(frozen=True)
class Program:
    """An entry point: what is exported, compiled and called.

    Attributes:
        name: Key among the programs of its subject.
        module: Takes tensors by position, returns a tuple of tensors; fp32 on the CPU, in eval mode.
        example: Inputs by name, in the order of the module's forward; their shapes and dtypes are what is compiled,
            but for the extents of symbolic axes.
        outputs: Names of the outputs, in the order in which the module returns them.
        uses_rope: Whether rotary position encoding is inside; if not, only the default strategy applies.
        symbolic: The inputs' symbolic axes.
    """

    name: str
    module: torch.nn.Module
    example: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]
    uses_rope: bool = False
    symbolic: Symbolic = field(default_factory=dict)

    @property
    def axes(self) -> tuple[Mapping[int, Axis], ...]:
        """The symbolic axes of each input, in order."""
        return tuple(self.symbolic.get(name, {}) for name in self.example)


@dataclass(frozen=True)
class Output:
    """An output of an earlier call, as an input of a later one: this is what holds state.

    Attributes:
        call: Name of the call.
        name: Name of the output.
    """

    call: str
    name: str


@dataclass(frozen=True)
class Call:
    """One call of a trace.

    Attributes:
        name: Key in its trace.
        program: Name of the program that is called.
        arguments: Inputs in the order of the program's; constants or captured tensors, and outputs of earlier calls.
        prefix: What the names of its outputs begin with in reports.
    """

    name: str
    program: str
    arguments: tuple[torch.Tensor | Output, ...]
    prefix: str = ""


Trace = Sequence[Call]
"""Calls in their order."""


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
    emulated: tuple[str, ...] = ()

"""Programs, the entry points that are compiled, and the trace of calls of them, which holds state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

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
        below: By the name of an input that indexes something: what its values are less than; they are at least 0.
    """

    name: str
    module: torch.nn.Module
    example: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]
    uses_rope: bool = False
    symbolic: Symbolic = field(default_factory=dict)
    below: Mapping[str, int] = field(default_factory=dict)

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

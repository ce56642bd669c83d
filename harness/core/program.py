"""Defines programs, which are compiled entry points, and traces of calls of them, which hold state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

Array: TypeAlias = "npt.NDArray[Any]"
Arrays = dict[str, Array]
"""Arrays by name."""


@dataclass(frozen=True)
class Axis:
    """An extent of an input that is unknown at compile time; axes with the same name have the same extent.

    Attributes:
        name: A Python identifier.
        min: The smallest extent, at least 1.
        max: The largest extent.
    """

    name: str
    min: int
    max: int


Symbolic = Mapping[str, Mapping[int, Axis]]
"""The symbolic axes of inputs: by the input's name, the axis by its number."""


@dataclass(frozen=True)
class Program:
    """An entry point that is exported, compiled and called.

    Attributes:
        name: Key among the programs of its subject.
        module: The module; it takes tensors by position and returns a tuple of tensors, in fp32 on the CPU in eval
            mode.
        example: Inputs by name, in the order of the module's forward. The program is compiled for their shapes and
            dtypes, except for the extents of symbolic axes.
        outputs: Names of the outputs, in the order in which the module returns them.
        uses_rope: Whether the module contains rotary position encoding; if not, only the default strategy applies.
        symbolic: Symbolic axes of the inputs.
        below: By the name of an input of indices, their exclusive upper bound; they are at least 0.
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
    """An output of an earlier call that is an input of a later call, which makes a trace stateful.

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
        name: Key of the call in its trace.
        program: Name of the program that is called.
        arguments: Inputs in the order of the program's inputs: constants or captured tensors, and outputs of earlier
            calls.
        prefix: Prefix of the names of its outputs in reports.
    """

    name: str
    program: str
    arguments: tuple[torch.Tensor | Output, ...]
    prefix: str = ""


Trace = Sequence[Call]
"""Calls in their order."""

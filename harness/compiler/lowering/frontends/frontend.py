"""Defines a frontend, which converts a PyTorch module to a Relax module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

    from harness.compiler.lowering.strategy import Strategy
    from harness.core.program import Axis


@dataclass(frozen=True)
class Frontend:
    """One conversion from a PyTorch module to a Relax module.

    Attributes:
        name: Registry key.
        summary: One line for `sam3-tvm list`.
        export: Takes a module in evaluation mode, its inputs and their symbolic axes; returns the module in the
            frontend's exchange format.
        import_exported: Takes the result of `export` and the RoPE strategy; returns the Relax module, whose `main`
            takes the inputs and then the parameters, and the parameters' values by name in the same order.
        symbolic: Whether the frontend takes symbolic axes.
        exports_program: Whether the exchange format is an ExportedProgram, whose nodes know their modules and their
            lines of the model's source.
    """

    name: str
    summary: str
    export: Callable[[torch.nn.Module, tuple[torch.Tensor, ...], Sequence[Mapping[int, Axis]]], Any]
    import_exported: Callable[[Any, Strategy], tuple[tvm.IRModule, dict[str, np.ndarray]]]
    symbolic: bool = False
    exports_program: bool = False

    def takes(self, strategy: Strategy) -> bool:
        """Returns whether a RoPE strategy goes through the frontend."""
        return self.exports_program or not strategy.needs_program

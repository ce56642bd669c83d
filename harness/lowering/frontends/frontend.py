"""Frontend: one way from a PyTorch module to a Relax module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

    from harness.core.program import Axis
    from harness.lowering.strategy import Strategy


class Export(Protocol):
    """Exports a module to a frontend's exchange format."""

    def __call__(
        self, module: torch.nn.Module, args: tuple[torch.Tensor, ...], axes: Sequence[Mapping[int, Axis]] = ()
    ) -> Any:
        """Takes a module in eval mode, its inputs, and their symbolic axes if the frontend takes any."""


@dataclass(frozen=True)
class Frontend:
    """One way from a PyTorch module to a Relax module.

    Attributes:
        name: Registry key.
        summary: One line for `sam3-tvm list`.
        export: Takes a module in eval mode, its inputs and their symbolic axes; returns it in the frontend's exchange
            format.
        import_exported: Takes what `export` returned and the RoPE strategy; returns the Relax module, whose `main`
            takes the inputs, then the parameters, and the values of these by name in the same order.
        strategies: Names of the RoPE strategies that go through it.
        symbolic: Whether it takes symbolic axes.
        exports_program: Whether its exchange format is an ExportedProgram, whose nodes know their modules and their
            lines of the model's source.
    """

    name: str
    summary: str
    export: Export
    import_exported: Callable[[Any, Strategy], tuple[tvm.IRModule, dict[str, np.ndarray]]]
    strategies: tuple[str, ...]
    symbolic: bool = False
    exports_program: bool = False

"""Frontend: one way from a PyTorch module to a Relax module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

    from harness.lowering.rope.strategy import Strategy


@dataclass(frozen=True)
class Frontend:
    """One way from a PyTorch module to a Relax module.

    Attributes:
        name: Registry key.
        summary: One line for `sam3-tvm list`.
        export: Takes a module in eval mode and its inputs; returns it in the frontend's exchange format.
        import_exported: Takes what `export` returned and the RoPE strategy; returns the Relax module, whose `main`
            takes the inputs, then the parameters, and the values of these by name in the same order.
        strategies: Names of the RoPE strategies that go through it.
    """

    name: str
    summary: str
    export: Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], Any]
    import_exported: Callable[[Any, Strategy], tuple[tvm.IRModule, dict[str, np.ndarray]]]
    strategies: tuple[str, ...]

"""Exports and imports modules through ONNX, by torch.export, PyTorch's ONNX exporter and TVM's importer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.compiler.lowering.frontends.onnx.exporting import export_module
from harness.compiler.lowering.frontends.onnx.importing import import_exported

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm


def import_module(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...]
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Exports and imports a PyTorch module, and returns the Relax module and its parameters' values.

    Results and errors are those of `import_exported`, and the errors of `export_module`.
    """
    return import_exported(export_module(module, args))


__all__ = ["export_module", "import_exported", "import_module"]

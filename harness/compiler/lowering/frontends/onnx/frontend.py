"""Defines the frontend `onnx`: PyTorch's ONNX exporter, and TVM's importer of ONNX models with workarounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.compiler.lowering.frontends.frontend import Frontend
from harness.compiler.lowering.frontends.onnx.exporting import Exported, export_module

if TYPE_CHECKING:
    import numpy as np
    import tvm

    from harness.compiler.lowering.strategy import Strategy


def _import(exported: Exported, _strategy: Strategy) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    from harness.compiler.lowering.frontends.onnx.importing import import_exported

    return import_exported(exported)


ONNX = Frontend(
    name="onnx",
    summary="PyTorch's ONNX exporter, and TVM's importer of ONNX models with its defects worked around",
    export=lambda module, args, _axes: export_module(module, args),
    import_exported=_import,
)

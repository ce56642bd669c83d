"""Defines the frontend `onnx`: PyTorch's ONNX exporter, and TVM's importer of ONNX models with workarounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.compiler.lowering.frontends.frontend import Frontend

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

    from harness.compiler.lowering.frontends.onnx.exporting import Exported
    from harness.compiler.lowering.strategy import Strategy
    from harness.core.program import Axis


def _export(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...], axes: Sequence[Mapping[int, Axis]] = ()
) -> Exported:
    from harness.compiler.lowering.frontends.onnx.exporting import export_module

    return export_module(module, args)


def _import(exported: Exported, _strategy: Strategy) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    from harness.compiler.lowering.frontends.onnx.importing import import_exported

    return import_exported(exported)


ONNX = Frontend(
    name="onnx",
    summary="PyTorch's ONNX exporter, and TVM's importer of ONNX models with its defects worked around",
    export=_export,
    import_exported=_import,
)

"""Defines the frontend `torch`: torch.export, and TVM's importer of exported programs with workarounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.compiler.lowering.frontends.exporting import export_program
from harness.compiler.lowering.frontends.frontend import Frontend
from harness.compiler.lowering.frontends.torch_export.importing import import_program

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

    from harness.compiler.lowering.strategy import Strategy


def _import(program: torch.export.ExportedProgram, strategy: Strategy) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    return import_program(strategy.transform(program), strategy.converters(), strategy.importer())


TORCH = Frontend(
    name="torch",
    summary="torch.export, and TVM's importer of exported programs with its defects worked around",
    export=export_program,
    import_exported=_import,
    symbolic=True,
    exports_program=True,
)

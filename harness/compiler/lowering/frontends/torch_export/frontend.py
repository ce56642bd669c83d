"""Defines the frontend `torch`: torch.export, and TVM's importer of exported programs with workarounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.compiler.lowering.frontends.frontend import Frontend

if TYPE_CHECKING:
    import numpy as np
    import torch
    import tvm

    from harness.compiler.lowering.strategy import Strategy
    from harness.core.program import Axis


def _export(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...], axes: Sequence[Mapping[int, Axis]]
) -> torch.export.ExportedProgram:
    from harness.compiler.lowering.frontends.exporting import export_program

    return export_program(module, args, axes)


def _import(program: torch.export.ExportedProgram, strategy: Strategy) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    from harness.compiler.lowering.frontends.torch_export.importing import import_program

    return import_program(strategy.transform(program), strategy.converters(), strategy.importer())


TORCH = Frontend(
    name="torch",
    summary="torch.export, and TVM's importer of exported programs with its defects worked around",
    export=_export,
    import_exported=_import,
    symbolic=True,
    exports_program=True,
)

"""Imports an exported ONNX model as a Relax module, with a workaround for every known defect of TVM's importer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import tvm

    from harness.compiler.lowering.frontends.onnx.exporting import Exported


def import_exported(exported: Exported) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Imports an exported model.

    Args:
        exported: The result of `export_module`; it is not changed.

    Returns:
        The module and its parameters. The module's `main` takes the module's inputs in order (their number is its
        attribute `num_input`), then every weight, buffer and table that the graph reads. The values of the latter are
        returned by name in the order of the parameters, and share memory with the PyTorch module's tensors that they
        equal. Constants of one element, and constants that determine an operator, are bound into the module. `main`
        returns a tuple of the outputs in order.

    Raises:
        tvm.error.OpNotImplemented: The importer does not know some operators, which the message names.
    """
    import onnx_ir

    from harness.compiler.lowering.frontends.onnx.defects import DEFECTS
    from harness.compiler.lowering.frontends.onnx.importer import Importer
    from harness.compiler.lowering.frontends.onnx.lifting import lift

    model = exported.model.clone()
    for defect in DEFECTS:
        for model_pass in defect.passes:
            model_pass(model)
    values = lift(model, exported.inputs)
    converters: dict[str, Any] = {
        name: converter for defect in DEFECTS for name, converter in defect.converters.items()
    }
    importer = Importer(len(exported.inputs), converters)
    return importer.module(onnx_ir.to_proto(model)), values

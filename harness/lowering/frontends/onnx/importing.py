"""From an exported ONNX model to a Relax module, with every known defect of TVM's importer worked around."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import tvm

    from harness.lowering.frontends.onnx.exporting import Exported


def import_exported(exported: Exported) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Imports an exported model.

    Args:
        exported: From `export_module`; it is not changed.

    Returns:
        The module and its parameters. The module's `main` takes the module's inputs in order (their number is its
        attribute `num_input`), then every weight, buffer and table that the graph reads; the values of the latter are
        returned by name in the order of the parameters, sharing memory with the PyTorch module where they are its
        tensors. Constants of one element, and those that say what an operator does, are bound into the module. `main`
        returns a tuple of the outputs in order.

    Raises:
        tvm.error.OpNotImplemented: Operators that the importer does not know, named in the message.
    """
    import onnx_ir

    from harness.lowering.frontends.onnx.defects import DEFECTS
    from harness.lowering.frontends.onnx.importer import Importer
    from harness.lowering.frontends.onnx.lifting import lift

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

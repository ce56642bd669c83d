"""Imports an exported ONNX model as a Relax module, with a workaround for every known defect of TVM's importer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map

from harness.compiler.lowering.frontends.onnx.defects import DEFECTS
from harness.compiler.lowering.frontends.onnx.exporting import OPSET, Exported, export_module, silence_exporter
from harness.compiler.lowering.frontends.onnx.lifting import lift

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from harness.compiler.lowering.frontends.defect import Converter


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
    model = exported.model.clone()
    for defect in DEFECTS:
        for model_pass in defect.model_passes:
            model_pass(model)
    values = lift(model, exported.inputs)
    converters = {name: converter for defect in DEFECTS for name, converter in defect.converters.items()}
    return _Importer(len(exported.inputs), converters).module(onnx_ir.to_proto(model)), values


def import_module(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...]
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Exports and imports a PyTorch module, and returns the Relax module and its parameters' values.

    Results and errors are those of `import_exported`, and the errors of `export_module`.
    """
    return import_exported(export_module(module, args))


def import_raw(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tvm.IRModule:
    """Exports a module and imports it as TVM's documentation does, without workarounds."""
    with torch.no_grad(), silence_exporter():
        exported = torch.onnx.export(module, args, dynamo=True, opset_version=OPSET, verbose=False)
        assert exported is not None
        return from_onnx(exported.model_proto)


class _Importer(ONNXGraphImporter):  # type: ignore[misc]
    """An importer of one lifted model.

    It differs from TVM's importer: inputs keep their names and shapes with a 0, `main` returns a tuple for any number
    of outputs, and the attribute `num_input` counts the inputs of the PyTorch module alone.
    """

    def __init__(self, num_input: int, converters: Mapping[str, Converter]) -> None:
        """Takes the number of the module's inputs, and converters by operator, which take precedence over TVM's."""
        super().__init__(shape_dict={}, dtype_dict={}, keep_params_in_input=False, sanitize=False)
        self._module_inputs = num_input
        self._converters = converters

    def module(self, model: onnx.ModelProto) -> tvm.IRModule:
        """Returns the Relax module of a model in operators of ONNX's own domain."""
        graph = model.graph
        (self.opset,) = (imported.version for imported in model.opset_import if imported.domain in ("", "ai.onnx"))
        self._shape = {
            value.name: [dimension.dim_value for dimension in value.type.tensor_type.shape.dim] for value in graph.input
        }
        self._parse_graph_initializers(graph)
        self._parse_graph_input(graph)
        self._check_for_unsupported_ops(graph)
        attributes = {"num_input": self._module_inputs}
        with self.bb.function("main", list(self._inputs.values()), attrs=attributes):
            with self.bb.dataflow():
                self._fill_empty(graph)
                self._construct_nodes(graph)
                outputs = [self._nodes[output.name] for output in graph.output]
                result = self.bb.emit_output(relax.Tuple(outputs))
            self.bb.emit_func_output(result)
        return self.bb.get()

    def _fill_empty(self, graph: onnx.GraphProto) -> None:
        """Replaces constants without elements by an operator, because a library with such constants cannot be loaded.

        The library stores constants in a format that has no empty tensors.
        """
        for initializer in graph.initializer:
            if 0 in initializer.dims:
                dtype = str(self._nodes[initializer.name].ty.dtype)
                self._nodes[initializer.name] = self.bb.emit(relax.op.zeros(list(initializer.dims), dtype))

    def _convert_operator(self, op_name: str, inputs: list[Any], attrs: dict[str, Any], opset: int) -> Any:
        converter = self._converters.get(op_name)
        if converter is None:
            return super()._convert_operator(op_name, inputs, attrs, opset)
        return self.bb.normalize(converter(self.bb, inputs, attrs))

    def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
        supported = {*_get_convert_map(), *self._converters, "Constant", "If"}
        unsupported = sorted({node.op_type for node in graph.node} - supported)
        if unsupported:
            raise tvm.error.OpNotImplemented(f"operators unknown to the ONNX importer: {', '.join(unsupported)}")

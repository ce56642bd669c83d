"""Works around the import of tensors without elements, such as zero points or zero boxes."""

from __future__ import annotations

import numpy as np
import onnx_ir
import torch

from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom


def _static_shape(value: onnx_ir.Value | None) -> tuple[int, ...] | None:
    """Returns a value's shape if all extents are known, else None."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(extent) for extent in value.shape.numpy())


def _is_empty(value: onnx_ir.Value | None) -> bool:
    """Returns whether a value is known to have no elements."""
    return 0 in (_static_shape(value) or ())


def _empty_constant(graph: onnx_ir.Graph, value: onnx_ir.Value) -> onnx_ir.Value:
    """Registers an initializer with the shape and dtype of a value without elements."""
    shape, dtype = _static_shape(value), value.dtype
    assert shape is not None and dtype is not None
    name = f"{value.name}_empty"
    tensor = onnx_ir.tensor(np.zeros(shape, dtype.numpy()), name=name)
    constant = onnx_ir.Value(
        name=name, shape=onnx_ir.Shape(shape), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(constant)
    return constant


def _drop_empty(model: onnx_ir.Model) -> None:
    """Replaces empty results by constants and removes empty operands from Concat, so that no code runs on them."""
    graph = model.graph
    for node in list(graph):
        data = node.inputs[0] if node.inputs else None
        if (
            data is not None
            and node.op_type.startswith("Scatter")
            and any(_is_empty(value) for value in node.inputs[1:])
        ):
            node.outputs[0].replace_all_uses_with(data, replace_graph_outputs=True)
        nonempty = [value for value in node.inputs if not _is_empty(value)]
        if node.op_type == "Concat" and len(nonempty) < len(node.inputs) and nonempty:
            node.resize_inputs(len(nonempty))
            for index, value in enumerate(nonempty):
                node.replace_input_with(index, value)
        for output in node.outputs:
            if _is_empty(output):
                output.replace_all_uses_with(_empty_constant(graph, output), replace_graph_outputs=True)
    for node in reversed(graph):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


DEFECTS = (
    Defect(
        name="empty_input",
        title="An input without elements gets a symbolic extent",
        location="tvm.relax.frontend.onnx.onnx_frontend.get_info",
        description=(
            "A 0 in the shape of an input is read as an extent that is not known, so that a variable without a name "
            "takes its place; what is computed from it has no shape that the compiler could know. SAM 3's geometry "
            "encoder meets this with no points or no boxes."
        ),
        function=lambda x, y: torch.cat([x.permute(1, 0, 2), y], dim=1),
        args=(torch.zeros(0, 2, 3), torch.ones(2, 1, 3)),
        raw=RawOutcome(Symptom.SLOW, absent="R.Tensor((0, 2, 3)", wrong="no input of the shape [0, 2, 3]"),
        workaround=(
            "The importer is told the shapes of all inputs. A pass replaces results without elements by constants and "
            "takes them out of Concat."
        ),
        model_passes=(_drop_empty,),
    ),
)

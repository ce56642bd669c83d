"""Works around the import of tensors without elements, such as zero points or zero boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect
from harness.compiler.lowering.frontends.onnx.rewriting import add_constant, drop_dead_nodes, is_empty, static_shape

if TYPE_CHECKING:
    import onnx_ir


class _Transpose(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x.permute(1, 0, 2), y], dim=1)


def _drop_empty(model: onnx_ir.Model) -> None:
    """Replaces empty results by constants and removes empty operands from Concat, so that no code runs on them."""
    graph = model.graph
    for node in list(graph):
        data = node.inputs[0] if node.inputs else None
        if (
            data is not None
            and node.op_type.startswith("Scatter")
            and any(is_empty(value) for value in node.inputs[1:])
        ):
            node.outputs[0].replace_all_uses_with(data, replace_graph_outputs=True)
        nonempty = [value for value in node.inputs if not is_empty(value)]
        if node.op_type == "Concat" and len(nonempty) < len(node.inputs) and nonempty:
            node.resize_inputs(len(nonempty))
            for index, value in enumerate(nonempty):
                node.replace_input_with(index, value)
        for output in node.outputs:
            if is_empty(output):
                shape, dtype = static_shape(output), output.dtype
                assert shape is not None and dtype is not None
                empty = add_constant(graph, f"{output.name}_empty", np.zeros(shape, dtype.numpy()))
                output.replace_all_uses_with(empty, replace_graph_outputs=True)
    drop_dead_nodes(graph)


DEFECTS = (
    OnnxDefect(
        name="empty_input",
        title="An input without elements gets a symbolic extent",
        location="tvm.relax.frontend.onnx.onnx_frontend.get_info",
        description=(
            "A 0 in the shape of an input is read as an extent that is not known, so that a variable without a name "
            "takes its place; what is computed from it has no shape that the compiler could know. SAM 3's geometry "
            "encoder meets this with no points or no boxes."
        ),
        reproduction=lambda: (_Transpose(), (torch.zeros(0, 2, 3), torch.ones(2, 1, 3))),
        raw=RawOutcome(Symptom.SLOW, absent="R.Tensor((0, 2, 3)", wrong="no input of the shape [0, 2, 3]"),
        workaround=(
            "The importer is told the shapes of all inputs. A pass replaces results without elements by constants and "
            "takes them out of Concat."
        ),
        passes=(_drop_empty,),
    ),
)

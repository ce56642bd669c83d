"""Works around TVM's scattering with a reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect

if TYPE_CHECKING:
    from torch.fx import GraphModule

_aten = torch.ops.aten
_PUT = (_aten.scatter.src, _aten.scatter_.src, _aten.scatter_add.default, _aten.scatter_add_.default)
_REDUCE = (_aten.scatter_reduce.two, _aten.scatter_reduce_.two)


class _Add(torch.nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.scatter_add(1, index, values)


def _cut_values(module: GraphModule) -> None:
    from harness.compiler.lowering.frontends.rewriting import calls, insert, source_line, value_of

    for node in calls(module, *_PUT, *_REDUCE):
        x, axis, index, values, *rest = node.args
        if node.target in _REDUCE and rest[0] == "mean":
            raise NotImplementedError(
                f"scatter_reduce with 'mean' is not known to PyTorch's ONNX exporter, called at {source_line(node)}: "
                "take a sum, and divide it."
            )
        for dim, count in enumerate(value_of(index).shape):
            if count != value_of(values).shape[dim]:
                values = insert(node, _aten.slice.Tensor, values, dim, 0, count)
        node.args = (x, axis, index, values, *rest)


DEFECTS = (
    OnnxDefect(
        name="scatter_more_values",
        title="Scattering fewer values than there are is rejected",
        location="torch.onnx, aten_scatter_add",
        description=(
            "PyTorch reads as many values as there are indices along each axis; in ONNX there are as many of both."
        ),
        reproduction=lambda: (_Add(), (torch.zeros(2, 3), torch.tensor([[0, 2]]), torch.ones(2, 3))),
        raw=RawOutcome(Symptom.REJECTED, "ValueError", "same shape with updates"),
        workaround=(
            "A pass that cuts the values first. Of `scatter_reduce` with `mean`, which PyTorch's exporter takes for no "
            "reduction at all, it says that there is none."
        ),
        program_passes=(_cut_values,),
    ),
)

"""Works around ScatterND and GatherND, which read shapes at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect
from harness.compiler.lowering.frontends.onnx.rewriting import shape_of

if TYPE_CHECKING:
    from tvm import relax


class _Put(torch.nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_put((index,), torch.zeros(()))


def _nonnegative_indices(indices: relax.Expr, extents: list[int]) -> relax.Expr:
    """Returns the indices [..., axes] with negative indices converted to indices from the front of their axis."""
    from tvm import relax

    dtype = str(indices.ty.dtype)
    ends = relax.const(np.asarray(extents, dtype), dtype) if len(extents) > 1 else relax.const(extents[0], dtype)
    negative = relax.op.less(indices, relax.const(0, dtype))
    return relax.op.where(negative, relax.op.add(indices, ends), indices)


def _convert_scatter(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    from tvm import relax

    data, indices, updates = (builder.normalize(value) for value in inputs)
    indices = _nonnegative_indices(indices, shape_of(data)[: shape_of(indices)[-1]])
    reduction = attributes.get("reduction", b"none").decode()
    return relax.op.scatter_nd(data, indices, updates, "update" if reduction == "none" else reduction)


def _convert_gather(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    from tvm import relax

    data, indices = (builder.normalize(value) for value in inputs)
    batch_dims = attributes.get("batch_dims", 0)
    indices = _nonnegative_indices(indices, shape_of(data)[batch_dims : batch_dims + shape_of(indices)[-1]])
    return relax.op.gather_nd(data, indices, batch_dims)


DEFECTS = (
    OnnxDefect(
        name="scatter_nd_shape",
        title="ScatterND and GatherND look at shapes at run time",
        location="tvm.relax.frontend.onnx.onnx_frontend._coord_axis_extents",
        description=(
            "To count negative indices from the end, the extents are taken from the tensor's shape at run time, though "
            "the importer knows them: three operators that nothing fuses with."
        ),
        reproduction=lambda: (_Put(), (torch.ones(3, 2), torch.tensor([0, -1]))),
        raw=RawOutcome(Symptom.SLOW, absent="R.const(3", wrong="the extent 3 is not in the module"),
        workaround="Converters that add the extents as constants.",
        converters={"ScatterND": _convert_scatter, "GatherND": _convert_gather},
    ),
)

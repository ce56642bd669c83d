"""Works around Gather with a constant index, which computes at run time values that are known at import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect
from harness.compiler.lowering.frontends.onnx.rewriting import constant_of, shape_of

if TYPE_CHECKING:
    from tvm import relax


class _Select(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[-2]


def _convert(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Converts negative indices to indices from the front, at import if they are constants."""
    from tvm import relax
    from tvm.relax.frontend.onnx.onnx_frontend import Gather

    data, indices = inputs
    if not all(isinstance(value.ty, relax.TensorType) for value in inputs):
        return Gather._impl_v13(builder, inputs, attributes, [{}, {}])
    data, indices = builder.normalize(data), builder.normalize(indices)
    axis = attributes.get("axis", 0) % len(shape_of(data))
    size, dtype, constant = shape_of(data)[axis], str(indices.ty.dtype), constant_of(indices)
    if constant is not None:
        indices = relax.const(np.where(constant < 0, constant + size, constant), dtype)
    else:
        negative = relax.op.less(indices, relax.const(0, dtype))
        indices = relax.op.where(negative, relax.op.add(indices, relax.const(size, dtype)), indices)
    return relax.op.take(data, indices, axis)


DEFECTS = (
    OnnxDefect(
        name="gather_constant",
        title="Gather with a constant index looks at shapes at run time",
        location="tvm.relax.frontend.onnx.onnx_frontend.Gather",
        description=(
            "To count negative indices from the end, the extent of the axis is taken from the tensor's shape at run "
            "time and the index is chosen by a where, also if both are known. The index is no constant then, so that "
            "no kernel reads the chosen part in place: SAM 3's rotary encoding takes query, key and value that way."
        ),
        reproduction=lambda: (_Select(), (torch.arange(12.0).reshape(3, 4),)),
        raw=RawOutcome(Symptom.SLOW, absent="R.take(x, R.const(1", wrong="no relax.take with a constant index"),
        workaround="A converter that counts from the front while it converts.",
        converters={"Gather": _convert},
    ),
)

"""Works around TVM's missing running product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect


class _RunningProduct(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumprod(0)


def _translate(x: Any, axes: Sequence[int], **_options: Any) -> Any:
    from onnxscript import opset23

    op: Any = opset23
    return op.ReduceProd(x, op.Constant(value_ints=list(axes)), keepdims=0)


DEFECTS = (
    OnnxDefect(
        name="cumprod",
        title="cumprod is not known",
        location="torch.onnx, prims.prod",
        description="It is decomposed into products of ever longer parts, and the product among the primitives has no "
        "translation.",
        reproduction=lambda: (_RunningProduct(), (torch.tensor([2.0, -3.0, 0.5]),)),
        raw=RawOutcome(Symptom.REJECTED, "ConversionError", r"prims\.prod"),
        workaround="A translation of that product.",
        translations={torch.ops.prims.prod.default: _translate},
    ),
)

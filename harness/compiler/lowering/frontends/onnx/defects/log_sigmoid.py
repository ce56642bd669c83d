"""Works around logsigmoid of numbers far below zero."""

from __future__ import annotations

from typing import Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect


class _LogSigmoid(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(x)


def _translate(value: Any) -> Any:
    from onnxscript import opset23

    return opset23.Neg(opset23.Softplus(opset23.Neg(value)))


DEFECTS = (
    OnnxDefect(
        name="log_sigmoid",
        title="logsigmoid is the logarithm of a sigmoid that has become 0",
        location="torch.onnx, aten_log_sigmoid",
        description=(
            "The sigmoid of -100 is too small for float32's normal numbers, so that its logarithm is -inf or inexact."
        ),
        reproduction=lambda: (_LogSigmoid(), (torch.tensor([-100.0, -20.0, 0.0, 20.0, 100.0]),)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="-inf instead of -100"),
        workaround="A translation of our own: -softplus(-x).",
        translations={torch.ops.aten.log_sigmoid.default: _translate},
    ),
)

"""Works around clamp of integer tensors with one bound, and its loss of NaN."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import argument
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Clamp(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(min=0)


def _clamp(node: Node, importer: Any, lowest: Any, highest: Any) -> Any:
    """Puts the bound first, because TVM's maximum and minimum return their second operand if one is NaN."""
    from tvm import relax

    emit = importer.block_builder.emit
    dtype = importer._convert_data_type(node.meta["val"].dtype)
    value = importer.env[node.args[0]]
    if node.args[0].meta["val"].dtype != node.meta["val"].dtype:
        value = emit(relax.op.astype(value, dtype))
    for bound, choose in ((lowest, relax.op.maximum), (highest, relax.op.minimum)):
        if isinstance(bound, Node):
            value = emit(choose(emit(relax.op.astype(importer.env[bound], dtype)), value))
        elif bound is not None:
            value = emit(choose(relax.const(bound, dtype), value))
    return value


def _convert_clamp(node: Node, importer: Any) -> Any:
    return _clamp(node, importer, argument(node, 1, "min"), argument(node, 2, "max"))


def _convert_clamp_min(node: Node, importer: Any) -> Any:
    return _clamp(node, importer, argument(node, 1, "min"), None)


def _convert_clamp_max(node: Node, importer: Any) -> Any:
    return _clamp(node, importer, None, argument(node, 1, "max"))


DEFECTS = (
    TorchDefect(
        name="clamp_integer",
        title="clamp of an integer tensor with one bound is rejected",
        location="BaseFXGraphImporter._clamp",
        description="The missing bound becomes an infinity, which has no integer value.",
        reproduction=lambda: (_Clamp(), (torch.tensor([-1, 1, 5]),)),
        raw=RawOutcome(Symptom.REJECTED, "RuntimeError", "infinity"),
        workaround=(
            "Converters that emit a maximum for the lower and a minimum for the upper bound, in the result's dtype."
        ),
        converters={
            "clamp.default": _convert_clamp,
            "clamp.Tensor": _convert_clamp,
            "clamp_min.default": _convert_clamp_min,
            "clamp_max.default": _convert_clamp_max,
        },
    ),
    TorchDefect(
        name="clamp_nan",
        title="clamp turns NaN into a bound",
        location="LLVM code generation of tirx.Max and tirx.Min",
        description=(
            "max(a, b) is compiled to `a > b ? a : b`, so that a NaN on the left is lost, and the importer puts "
            "the tensor on the left. PyTorch's clamp keeps NaN."
        ),
        reproduction=lambda: (_Clamp(), (torch.tensor([math.nan, -1.0, 1.0]),)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="0 instead of NaN"),
        workaround="The converters of clamp_integer put the bound on the left.",
    ),
)

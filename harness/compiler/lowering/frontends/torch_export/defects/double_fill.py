"""Works around full_like with a number that only float64 can hold, or that is infinite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import value_of
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Fill(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, 1e200) * x


class _FillInfinite(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, -math.inf).maximum(x)


def _convert(node: Node, importer: Any) -> Any:
    from tvm import relax

    value = value_of(node)
    if value.dtype != torch.float64 and math.isfinite(node.args[1]):
        return importer._full_like(node)
    scalar = relax.const(node.args[1], importer._convert_data_type(value.dtype))
    return importer.block_builder.emit(relax.op.broadcast_to(scalar, list(value.shape)))


DEFECTS = (
    TorchDefect(
        name="double_fill",
        title="full_like with a number beyond float32 is rejected",
        location="tvm.topi.full_like",
        description="The number is held to the range of float32, whatever the dtype of the tensor is.",
        reproduction=lambda: (_Fill(), (torch.tensor([1.0, -2.0], dtype=torch.float64),)),
        raw=RawOutcome(Symptom.REJECTED, "ValueError", "exceeds maximum of float32"),
        workaround="A converter that broadcasts a constant of float64.",
        converters={"full_like.default": _convert},
    ),
    TorchDefect(
        name="infinite_fill_like",
        title="full_like with an infinite value does not compile",
        location="tvm.topi.full",
        description="As infinite_fill: a TypeError in the compiler.",
        reproduction=lambda: (_FillInfinite(), (torch.tensor([1.0, -2.0]),)),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "PrimType"),
        workaround="The converter of double_fill.",
    ),
)

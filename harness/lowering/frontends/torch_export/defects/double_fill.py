"""full_like with a number that only float64 can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.lowering.frontends.defect import RawOutcome, Symptom
from harness.lowering.frontends.torch_export.defect import TorchDefect
from harness.lowering.frontends.torch_export.rewriting import value_of


class _Fill(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, 1e200) * x


def _convert(node: Node, importer: Any) -> Any:
    from tvm import relax

    value = value_of(node)
    if value.dtype != torch.float64:
        return importer._full_like(node)
    return importer.block_builder.emit(relax.op.broadcast_to(relax.const(node.args[1], "float64"), list(value.shape)))


DEFECTS = (
    TorchDefect(
        name="double_fill",
        title="full_like with a number beyond float32 is rejected",
        where="tvm.topi.full_like",
        what="The number is held to the range of float32, whatever the dtype of the tensor is.",
        reproduction=lambda: (_Fill(), (torch.tensor([1.0, -2.0], dtype=torch.float64),)),
        raw=RawOutcome(Symptom.REJECTED, "ValueError", "exceeds maximum of float32"),
        workaround="A converter that broadcasts a constant of float64.",
        converters={"full_like.default": _convert},
    ),
)

"""Works around full with an infinite value."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Fill(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full((2, 2), float("-inf")).maximum(x)


def _convert(node: Node, importer: Any) -> Any:
    from tvm import relax

    dtype = importer._convert_data_type(node.meta["val"].dtype)
    scalar = relax.const(node.args[1], dtype)
    return importer.block_builder.emit(relax.op.broadcast_to(scalar, list(node.meta["val"].shape)))


DEFECTS = (
    TorchDefect(
        name="infinite_fill",
        title="full with an infinite value does not compile",
        location="tvm.topi.full",
        description=(
            "Its check of infinite values expects the dtype as a string, but gets an object: a TypeError in the "
            "compiler."
        ),
        reproduction=lambda: (_Fill(), (torch.zeros(2, 2),)),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "PrimType"),
        workaround="A converter that broadcasts a constant.",
        converters={"full.default": _convert},
    ),
)

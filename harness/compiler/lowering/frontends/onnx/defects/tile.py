"""Works around the import of Tile as a function that no rule recognizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect
from harness.compiler.lowering.frontends.onnx.rewriting import constant_of

if TYPE_CHECKING:
    from tvm import relax


class _Repeat(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(2, 3)


def _convert(_builder: relax.BlockBuilder, inputs: list[Any], _attributes: dict[str, Any]) -> Any:
    from tvm import relax

    repeats = constant_of(inputs[1])
    if repeats is None:
        raise NotImplementedError("Tile with repeats that are not known before")
    return relax.op.tile(inputs[0], [int(count) for count in repeats])


DEFECTS = (
    OnnxDefect(
        name="tile_function",
        title="Tile is imported as a compiled function instead of relax.tile",
        location="tvm.relax.frontend.onnx.onnx_frontend.Tile",
        description="The loops are there from the start, so that no rule for relax.tile applies.",
        reproduction=lambda: (_Repeat(), (torch.arange(4.0).reshape(2, 2),)),
        raw=RawOutcome(Symptom.SLOW, absent="R.tile(", wrong="no relax.tile in the module"),
        workaround="A converter that emits relax.tile.",
        converters={"Tile": _convert},
    ),
)

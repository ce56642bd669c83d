"""Works around select with a negative index, which reads outside the tensor."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import calls, value_of
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Last(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[-1]


def _make_index_nonnegative(module: GraphModule) -> None:
    for node in calls(module, torch.ops.aten.select.int):
        source, dim, index = node.args
        if index < 0:
            node.args = (source, dim, index + value_of(source).shape[dim])


DEFECTS = (
    TorchDefect(
        name="select_negative_index",
        title="select with a negative index reads memory before the tensor",
        location="ExportedProgramImporter._select",
        description=(
            "x[-1] becomes relax.op.take with the constant -1 in the mode `fast`, which does not check bounds: "
            "the result is whatever lies in memory before the tensor. In SAM 3's segmentation head "
            "obj_queries[-1] picks the last decoder layer that way, so pred_masks were wrong by 4.2 while the "
            "semantic map was right."
        ),
        reproduction=lambda: (_Last(), (torch.arange(12, dtype=torch.float32).reshape(3, 4) + 1,)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values from outside the tensor"),
        workaround="A pass that counts the index from the front.",
        passes=(_make_index_nonnegative,),
    ),
)

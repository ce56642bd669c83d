"""Works around torch._assert_async, which prevents the optimization of the whole function."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import calls
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Checked(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), "positive")
        return (x + 1).exp()


def _remove(module: GraphModule) -> None:
    aten = torch.ops.aten
    checks = (aten._assert_async.default, aten._assert_async.msg, aten._assert_tensor_metadata.default)
    for node in calls(module, *checks):
        if not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


DEFECTS = (
    TorchDefect(
        name="assertion_stops_optimization",
        title="One runtime assertion keeps a whole function from being optimized",
        location="ExportedProgramImporter.from_exported_program",
        description=(
            "A graph with torch._assert_async is imported as an impure function without a dataflow block, and "
            "fusion only looks into dataflow blocks. SAM 3's geometry encoder checks its padding masks that way."
        ),
        reproduction=lambda: (_Checked(), (torch.ones(2),)),
        raw=RawOutcome(Symptom.SLOW, absent="R.dataflow()", wrong="no dataflow block, no fusion"),
        workaround="A pass that removes the assertions; the inputs' validity is PyTorch's to check.",
        passes=(_remove,),
    ),
)

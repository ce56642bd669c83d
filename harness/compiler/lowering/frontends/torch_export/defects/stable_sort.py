"""Works around sort with the argument `stable`."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import argument
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Sort(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.sort(x, dim=1, stable=True)
        return values, indices


def _convert(node: Node, importer: Any) -> Any:
    from tvm import relax

    emit = importer.block_builder.emit
    value = importer.env[node.args[0]]
    dim, descending = argument(node, 2, "dim", -1), bool(argument(node, 3, "descending", False))
    indices = emit(relax.op.argsort(value, dim, descending, dtype="int64"))
    return emit(relax.Tuple([emit(relax.op.gather_elements(value, indices, axis=dim)), indices]))


DEFECTS = (
    TorchDefect(
        name="stable_sort",
        title="sort(stable=True) is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="The overload is missing from the table of operators, although TVM's sort on the CPU is stable.",
        reproduction=lambda: (_Sort(), (torch.tensor([[1, 0, 1, 0]]),)),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"sort\.stable"),
        workaround="A converter.",
        converters={"sort.stable": _convert},
    ),
)

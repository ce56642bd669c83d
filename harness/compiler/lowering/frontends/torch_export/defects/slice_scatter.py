"""Works around slice_scatter with an open start or end."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import argument
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Overwrite(torch.nn.Module):
    def forward(self, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.aten.slice_scatter.default(x, source, 0, None, 2)
        return result


def _convert(node: Node, importer: Any) -> Any:
    from tvm import relax

    data, source = importer.env[node.args[0]], importer.env[node.args[1]]
    shape = node.args[0].meta["val"].shape
    dim = argument(node, 2, "dim", 0) % len(shape)
    bounds = slice(argument(node, 3, "start"), argument(node, 4, "end"), argument(node, 5, "step", 1))
    start, end, step = (relax.prim_value(bound) for bound in bounds.indices(shape[dim]))
    return importer.block_builder.emit(relax.op.slice_scatter(data, source, start, end, step, axis=dim))


DEFECTS = (
    TorchDefect(
        name="slice_scatter_open",
        title="slice_scatter with an open start is rejected",
        location="BaseFXGraphImporter._slice_scatter",
        description="The default of the start is only filled in where the argument is missing, not where it is None.",
        reproduction=lambda: (_Overwrite(), (torch.zeros(3), torch.ones(2))),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "Cannot convert None"),
        workaround="A converter that counts both bounds as Python's slices do.",
        converters={"slice_scatter.default": _convert},
    ),
)

"""Works around the compilation of tensors without elements, such as zero points or zero boxes."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import calls, insert, value_of
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Transpose(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(1, 0, 2)


def _is_empty(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor) and value_of(node).numel() == 0


def _drop_empty(module: GraphModule) -> None:
    """Replaces empty results by constants and removes empty operands from cat, so that no code runs on them."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or not _is_empty(node) or node.target is torch.ops.aten.full.default:
            continue
        value = value_of(node)
        filler = 0.0 if value.dtype.is_floating_point else 0
        node.replace_all_uses_with(
            insert(node, torch.ops.aten.full.default, list(value.shape), filler, dtype=value.dtype)
        )
    for node in calls(module, torch.ops.aten.cat.default):
        nonempty = [operand for operand in node.args[0] if not _is_empty(operand)]
        if nonempty:
            node.args = (nonempty, *node.args[1:])
    aten = torch.ops.aten
    for node in calls(module, aten.scatter.src, aten.index_put.default, aten.slice_scatter.default):
        if any(_is_empty(operand) for operand in node.args):
            node.replace_all_uses_with(node.args[0])
    module.graph.eliminate_dead_code()


DEFECTS = (
    TorchDefect(
        name="empty_transpose",
        title="permute of a tensor without elements does not compile",
        location="relax.transform.RewriteDataflowReshape",
        description=(
            "The pass takes the permutation for a reshape, as it moves nothing, and relax.op.reshape reads a 0 in the "
            "target shape as `copy this dimension of the input`, so that [2, 0, 3] becomes [2, 2, 3]. SAM 3's geometry "
            "encoder meets this with no points or no boxes."
        ),
        reproduction=lambda: (_Transpose(), (torch.zeros(0, 2, 3),)),
        raw=RawOutcome(Symptom.REJECTED, "ValueError", "Reshape expects the new shape to be convertible"),
        workaround="A pass that replaces results without elements by constants and takes them out of cat.",
        passes=(_drop_empty,),
    ),
)

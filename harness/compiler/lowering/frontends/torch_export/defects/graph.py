"""Works around what whole graphs do not compile with: assertions, and tensors without elements."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import calls, insert, value_of

_aten = torch.ops.aten


def _checked(x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x > 0).all(), "positive")
    return (x + 1).exp()


def _remove_assertions(module: GraphModule) -> None:
    checks = (_aten._assert_async.default, _aten._assert_async.msg, _aten._assert_tensor_metadata.default)
    for node in calls(module, *checks):
        if not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _is_empty(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor) and value_of(node).numel() == 0


def _drop_empty(module: GraphModule) -> None:
    """Replaces empty results by constants and removes empty operands from cat, so that no code runs on them."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and _is_empty(node) and node.target is not _aten.full.default:
            value = value_of(node)
            filler = 0.0 if value.dtype.is_floating_point else 0
            empty = insert(node, _aten.full.default, list(value.shape), filler, dtype=value.dtype)
            node.replace_all_uses_with(empty)
    for node in calls(module, _aten.cat.default):
        nonempty = [operand for operand in node.args[0] if not _is_empty(operand)]
        if nonempty:
            node.args = (nonempty, *node.args[1:])
    for node in calls(module, _aten.scatter.src, _aten.index_put.default, _aten.slice_scatter.default):
        if any(_is_empty(operand) for operand in node.args):
            node.replace_all_uses_with(node.args[0])
    module.graph.eliminate_dead_code()


DEFECTS = (
    Defect(
        name="assertion_stops_optimization",
        title="One runtime assertion keeps a whole function from being optimized",
        location="ExportedProgramImporter.from_exported_program",
        description=(
            "A graph with torch._assert_async is imported as an impure function without a dataflow block, and "
            "fusion only looks into dataflow blocks. SAM 3's geometry encoder checks its padding masks that way."
        ),
        function=_checked,
        args=(torch.ones(2),),
        raw=RawOutcome(Symptom.SLOW, absent="R.dataflow()", wrong="no dataflow block, no fusion"),
        workaround="A pass that removes the assertions; the inputs' validity is PyTorch's to check.",
        passes=(_remove_assertions,),
    ),
    Defect(
        name="empty_transpose",
        title="permute of a tensor without elements does not compile",
        location="relax.transform.RewriteDataflowReshape",
        description=(
            "The pass takes the permutation for a reshape, as it moves nothing, and relax.op.reshape reads a 0 in the "
            "target shape as `copy this dimension of the input`, so that [2, 0, 3] becomes [2, 2, 3]. SAM 3's geometry "
            "encoder meets this with no points or no boxes."
        ),
        function=lambda x: x.permute(1, 0, 2),
        args=(torch.zeros(0, 2, 3),),
        raw=RawOutcome(Symptom.REJECTED, "ValueError", "Reshape expects the new shape to be convertible"),
        workaround="A pass that replaces results without elements by constants and takes them out of cat.",
        passes=(_drop_empty,),
    ),
)

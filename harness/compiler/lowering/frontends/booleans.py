"""Replaces sums and products of boolean tensors, which LLVM does not have, for both frontends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom

if TYPE_CHECKING:
    from torch.fx import GraphModule

_aten = torch.ops.aten
_LOGICAL_OPERATORS: dict[Any, Any] = {
    _aten.add.Tensor: _aten.logical_or.default,
    _aten.mul.Tensor: _aten.logical_and.default,
}


class _EitherAndBoth(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) * x


def to_logic(module: GraphModule) -> None:
    """Replaces sums and products of booleans by `or` and `and`, which is what PyTorch computes."""
    from torch.fx import Node

    from harness.compiler.lowering.frontends.rewriting import calls, value_of

    for node in calls(module, *_LOGICAL_OPERATORS):
        if value_of(node).dtype == torch.bool and all(isinstance(operand, Node) for operand in node.args):
            node.target = _LOGICAL_OPERATORS[node.target]


FACTS: dict[str, Any] = {
    "name": "boolean_sum",
    "title": "Adding or multiplying boolean tensors is rejected",
    "location": "LLVM code generation of tirx.Add and tirx.Mul",
    "description": "There is no sum and no product of booleans. PyTorch's are `or` and `and`.",
    "reproduction": lambda: (_EitherAndBoth(), (torch.tensor([True, False]), torch.tensor([True, True]))),
    "raw": RawOutcome(Symptom.REJECTED, "InternalError", "kDLFloat"),
    "workaround": "A pass that makes them `logical_or` and `logical_and`.",
}
"""The fields of the defect that both frontends share."""

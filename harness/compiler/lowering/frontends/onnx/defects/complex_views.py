"""Works around operators that copy or select complex numbers and have no complex form in PyTorch's exporter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from harness.compiler.lowering.frontends.defect import Defect, GraphPass, RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import calls, insert, value_of

_aten = torch.ops.aten

ForPairs = Callable[..., tuple[Any, ...]]
"""Takes the arguments of an operator after the first, returns those that do the same to pairs [..., 2]."""


def _pair_dimension(dimension: int) -> int:
    """Returns the dimension of the pairs for a dimension of the complex numbers, which lack the pairs' last one."""
    return dimension if dimension >= 0 else dimension - 1


def _move_pairs(operator: Callable[..., Any], for_pairs: ForPairs) -> GraphPass:
    """Returns the pass that applies an operator to pairs of real numbers."""

    def rewrite(module: GraphModule) -> None:
        for node in calls(module, operator):
            numbers, *further_args = node.args
            if value_of(node).is_complex():
                pairs = insert(node, _aten.view_as_real.default, numbers)
                moved = insert(node, operator, pairs, *for_pairs(*further_args))
                node.replace_all_uses_with(insert(node, _aten.view_as_complex.default, moved))
                node.graph.erase_node(node)

    return rewrite


def _defect(name: str, function: Callable[..., Any], operator: Any, for_pairs: ForPairs) -> Defect:
    return Defect(
        name=f"complex_{name}",
        title=f"{name} of a complex tensor is rejected",
        location="torch.onnx, dispatch",
        description=(
            "The exporter writes a complex tensor as a real one with a last dimension of 2, for operators that have a "
            f"translation for it; {name} has none, and `custom_translation_table` takes translations of real tensors "
            "alone."
        ),
        function=function,
        args=(torch.arange(4.0).view(1, 2, 2),),
        raw=RawOutcome(Symptom.REJECTED, "ConversionError", "No decompositions registered for the complex-valued"),
        workaround="A pass over the exported program: the operator moves the pairs of view_as_real.",
        passes=(_move_pairs(operator, for_pairs),),
    )


DEFECTS = (
    _defect(
        "repeat",
        lambda x: torch.view_as_real(torch.view_as_complex(x).repeat(2, 3)),
        _aten.repeat.default,
        lambda counts: ([*counts, 1],),
    ),
    _defect(
        "expand",
        lambda x: torch.view_as_real(torch.view_as_complex(x).expand(4, -1)),
        _aten.expand.default,
        lambda sizes: ([*sizes, -1],),
    ),
    _defect(
        "unsqueeze",
        lambda x: torch.view_as_real(torch.view_as_complex(x).unsqueeze(-1)),
        _aten.unsqueeze.default,
        lambda dimension: (_pair_dimension(dimension),),
    ),
    _defect(
        "select",
        lambda x: torch.view_as_real(torch.view_as_complex(x).select(-1, 1)),
        _aten.select.int,
        lambda dimension, index: (_pair_dimension(dimension), index),
    ),
)

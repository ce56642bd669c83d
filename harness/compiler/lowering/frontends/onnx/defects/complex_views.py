"""Works around operators that copy or select complex numbers and have no complex form in PyTorch's exporter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect, ProgramPass

if TYPE_CHECKING:
    from torch.fx import GraphModule

_aten = torch.ops.aten


class _Repeat(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x).repeat(2, 3))


class _Expand(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x).expand(4, -1))


class _Unsqueeze(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x).unsqueeze(-1))


class _Select(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.view_as_complex(x).select(-1, 1))


def _pair_dimension(dimension: int) -> int:
    """Returns the dimension of the pairs for a dimension of the complex numbers, which lack the pairs' last one."""
    return dimension if dimension >= 0 else dimension - 1


def _pairs_pass(operator: Callable[..., Any], for_pairs: Callable[..., tuple[Any, ...]]) -> ProgramPass:
    """Returns the pass that applies an operator to pairs of real numbers; `for_pairs` changes its further arguments."""

    def rewrite(module: GraphModule) -> None:
        from harness.compiler.lowering.frontends.rewriting import calls, insert, value_of

        for node in calls(module, operator):
            numbers, *further_args = node.args
            if not value_of(node).is_complex():
                continue
            pairs = insert(node, _aten.view_as_real.default, numbers)
            moved = insert(node, operator, pairs, *for_pairs(*further_args))
            node.replace_all_uses_with(insert(node, _aten.view_as_complex.default, moved))
            node.graph.erase_node(node)

    return rewrite


def _defect(
    name: str, module: type[torch.nn.Module], operator: Any, for_pairs: Callable[..., tuple[Any, ...]]
) -> OnnxDefect:
    return OnnxDefect(
        name=f"complex_{name}",
        title=f"{name} of a complex tensor is rejected",
        location="torch.onnx, dispatch",
        description=(
            "The exporter writes a complex tensor as a real one with a last dimension of 2, for operators that have a "
            f"translation for it; {name} has none, and `custom_translation_table` takes translations of real tensors "
            "alone."
        ),
        reproduction=lambda: (module(), (torch.arange(4.0).view(1, 2, 2),)),
        raw=RawOutcome(Symptom.REJECTED, "ConversionError", "No decompositions registered for the complex-valued"),
        workaround="A pass over the exported program: the operator moves the pairs of view_as_real.",
        program_passes=(_pairs_pass(operator, for_pairs),),
    )


DEFECTS = (
    _defect("repeat", _Repeat, _aten.repeat.default, lambda counts: ([*counts, 1],)),
    _defect("expand", _Expand, _aten.expand.default, lambda sizes: ([*sizes, -1],)),
    _defect("unsqueeze", _Unsqueeze, _aten.unsqueeze.default, lambda dimension: (_pair_dimension(dimension),)),
    _defect("select", _Select, _aten.select.int, lambda dimension, index: (_pair_dimension(dimension), index)),
)

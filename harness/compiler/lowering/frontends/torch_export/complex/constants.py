"""Folds complex tensors that depend on no input, such as a table that torch.polar makes of a range.

PyTorch computes them, so that they equal PyTorch's to the last bit, cost nothing at run time, and are stored like any
other table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from harness.compiler.lowering.frontends.torch_export.complex.values import is_complex

_aten = torch.ops.aten

_LARGER = (_aten.expand.default, _aten.repeat.default)
"""Operators whose results only take more memory than their operands."""

_CREATION = (_aten.full.default, _aten.scalar_tensor.default)
"""Operators that the lowered program can call at no cost."""


def fold_constants(graph: Graph) -> tuple[dict[Node, torch.Tensor], set[Node]]:
    """Computes the complex tensors that a graph in core ATen operators makes of Python numbers alone.

    Returns:
        The values of the folded complex tensors that the remaining graph reads, by node; and the nodes that only they
        need.
    """
    fixed: set[Node] = set()
    for node in graph.nodes:
        if _is_deterministic(node) and all(argument in fixed for argument in node.all_input_nodes):
            fixed.add(node)
    folded = [
        node
        for node in graph.nodes
        if node in fixed and is_complex(node) and node.target not in _CREATION and not fixed.issuperset(node.users)
    ]
    values: dict[Node, Any] = {}
    results = {node: _compute(node, values) for node in folded}
    unused: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in fixed and node not in results and all(user in results or user in unused for user in node.users):
            unused.add(node)
    return results, unused


def _is_deterministic(node: Node) -> bool:
    return (
        node.op == "call_function"
        and isinstance(node.target, torch._ops.OpOverload)
        and node.target not in _LARGER
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _compute(node: Node, values: dict[Node, Any]) -> Any:
    """Computes the value of a node, and stores the values of its arguments."""
    for argument in node.all_input_nodes:
        if argument not in values:
            _compute(argument, values)
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda argument: values[argument])
    values[node] = node.target(*args, **kwargs)
    return values[node]

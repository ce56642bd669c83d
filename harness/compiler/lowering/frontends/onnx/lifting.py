"""Makes every data tensor of an ONNX model an input, so that weights stay out of the compiled code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir

_MAX_BOUND_ELEMENTS = 1
"""Largest number of elements of constants that remain constants, so that the compiler can fold and inline them."""

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_SECOND_INPUT = ("CumSum", "Expand", "OneHot", "Reshape", "Split", "Squeeze", "Tile", "TopK", "Unsqueeze")
STATIC_INPUTS = {
    **dict.fromkeys((*_SECOND_INPUT, *(f"Reduce{reduction}" for reduction in _REDUCTIONS)), (1,)),
    "ConstantOfShape": (0,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
}
"""Operator → the inputs that determine the computation, such as a shape or axes, and are not data."""


def lift(model: onnx_ir.Model, inputs: Sequence[str]) -> dict[str, np.ndarray]:
    """Makes inputs of a model's initializers, in place, except of one-element tensors, shapes, axes and so on.

    Unread initializers are dropped. All inputs get names that Relax accepts.

    Args:
        model: Its inputs are those of the PyTorch module; the lifted inputs follow.
        inputs: Names of the PyTorch module's inputs.

    Returns:
        The values of the lifted initializers by their old names, in order. Contiguous values share memory with the
        model's source.
    """
    graph = model.graph
    used_names: set[str] = set()
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = _valid_name(name, used_names)
    values: dict[str, np.ndarray] = {}
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
        elif not _is_bound(value):
            values[name] = _array(value)
            del graph.initializers[name]
            value.const_value = None
            value.name = _valid_name(name, used_names)
            graph.inputs.append(value)
    return values


def _array(value: onnx_ir.Value) -> np.ndarray:
    assert value.const_value is not None
    array = value.const_value.numpy()
    return array if array.flags.c_contiguous else array.copy()


def _is_bound(value: onnx_ir.Value) -> bool:
    assert value.const_value is not None
    return value.const_value.size <= _MAX_BOUND_ELEMENTS or any(
        index in STATIC_INPUTS.get(node.op_type, ()) for node, index in value.uses()
    )


def _valid_name(name: str, used_names: set[str]) -> str:
    """Returns the name with letters, digits and underscores alone, and with a number if it is already used."""
    base = re.sub(r"\W", "_", name, flags=re.ASCII)
    base = f"_{base}" if not base or base[0].isdigit() else base
    unique, number = base, 0
    while unique in used_names:
        number += 1
        unique = f"{base}_{number}"
    used_names.add(unique)
    return unique

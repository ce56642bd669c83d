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

STATIC_INPUTS = {
    "ConstantOfShape": (0,),
    "CumSum": (1,),
    "Expand": (1,),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "ReduceL1": (1,),
    "ReduceL2": (1,),
    "ReduceLogSum": (1,),
    "ReduceLogSumExp": (1,),
    "ReduceMax": (1,),
    "ReduceMean": (1,),
    "ReduceMin": (1,),
    "ReduceProd": (1,),
    "ReduceSum": (1,),
    "ReduceSumSquare": (1,),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "TopK": (1,),
    "Unsqueeze": (1,),
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
    names = _Names()
    for value, name in zip(graph.inputs, inputs, strict=True):
        value.name = names.valid(name)
    values: dict[str, np.ndarray] = {}
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
        elif not _is_bound(value):
            values[name] = _array(value)
            del graph.initializers[name]
            value.const_value = None
            value.name = names.valid(name)
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


class _Names:
    """Unique parameter names from tensor names, of letters, digits and underscores."""

    def __init__(self) -> None:
        self._used_names: set[str] = set()

    def valid(self, name: str) -> str:
        """Returns the name with other characters replaced, and a number appended if the name is already used."""
        base = re.sub(r"\W", "_", name, flags=re.ASCII)
        base = f"_{base}" if not base or base[0].isdigit() else base
        unique, number = base, 0
        while unique in self._used_names:
            number += 1
            unique = f"{base}_{number}"
        self._used_names.add(unique)
        return unique

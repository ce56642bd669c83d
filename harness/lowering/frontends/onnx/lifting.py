"""Makes every tensor of an ONNX model that is data an input of it, so that weights stay out of the compiled code."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir

    from harness.lowering.frontends.onnx.exporting import Exported

_LARGEST_BOUND = 1
"""Constants up to this many elements stay constants, so that the compiler can fold and inline them."""

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
"""By operator: the inputs that say what is computed, such as a shape or axes, and not what it is computed with."""


def lift(exported: Exported) -> tuple[onnx_ir.Model, dict[str, np.ndarray]]:
    """Copies a model, and makes inputs of all initializers of the copy but one-element ones and shapes, axes and so on.

    Inputs and initializers get names that Relax takes.

    Returns:
        The copy, whose inputs are those of the module and then the lifted ones, and the values of the latter by their
        old names, in order. Values share memory with the exported model where they are contiguous there.
    """
    model = exported.model.clone()
    graph = model.graph
    names = _Names()
    for value, name in zip(graph.inputs, exported.inputs, strict=True):
        value.name = names.valid(name)
    values: dict[str, np.ndarray] = {}
    for name, value in list(graph.initializers.items()):
        if not _is_read(value):
            del graph.initializers[name]
        elif not _is_bound(value):
            assert value.const_value is not None
            values[name] = np.ascontiguousarray(value.const_value.numpy()).reshape(value.const_value.shape.numpy())
            del graph.initializers[name]
            value.const_value = None
            value.name = names.valid(name)
            graph.inputs.append(value)
    return model, values


def _is_read(value: onnx_ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _is_bound(value: onnx_ir.Value) -> bool:
    assert value.const_value is not None
    return value.const_value.size <= _LARGEST_BOUND or any(
        index in STATIC_INPUTS.get(node.op_type, ()) for node, index in value.uses()
    )


class _Names:
    """Makes names of parameters from names of tensors: letters, digits and underscores, each once."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def valid(self, name: str) -> str:
        """The name with other characters replaced, and a number behind it if it is taken."""
        base = re.sub(r"\W", "_", name, flags=re.ASCII)
        base = f"_{base}" if not base or base[0].isdigit() else base
        unique, number = base, 0
        while unique in self._taken:
            number += 1
            unique = f"{base}_{number}"
        self._taken.add(unique)
        return unique

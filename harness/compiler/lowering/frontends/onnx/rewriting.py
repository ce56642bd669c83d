"""Provides helpers for passes over ONNX models and for converters: constants, shapes, removal of unread nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir
    from numpy.typing import NDArray
    from tvm import relax


def static_shape(value: onnx_ir.Value | None) -> tuple[int, ...] | None:
    """Returns a value's shape if all extents are known, else None."""
    if value is None or value.shape is None or not value.shape.is_static():
        return None
    return tuple(int(extent) for extent in value.shape.numpy())


def is_empty(value: onnx_ir.Value | None) -> bool:
    """Returns whether a value is known to have no elements."""
    return 0 in (static_shape(value) or ())


def add_constant(graph: onnx_ir.Graph, name: str, array: NDArray[Any]) -> onnx_ir.Value:
    """Registers an initializer."""
    import onnx_ir

    tensor = onnx_ir.tensor(array, name=name)
    value = onnx_ir.Value(
        name=name, shape=onnx_ir.Shape(array.shape), type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def drop_dead_nodes(graph: onnx_ir.Graph) -> None:
    """Removes the nodes whose results are never read."""
    for node in reversed(graph):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def shape_of(value: relax.Expr) -> list[int]:
    """Returns the static shape of a Relax tensor."""
    return [int(extent) for extent in value.ty.shape]


def constant_of(value: Any) -> NDArray[Any] | None:
    """Returns the values of a Relax constant, None for any other value."""
    from tvm import ir

    return np.asarray(value.value.numpy()) if isinstance(value, ir.GenericConst) else None

"""Resizes images to one row or column with aligned corners, where TVM divides by the number of pixels less one."""

from __future__ import annotations

from tvm import relax, topi

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, default


def _resize2d(builder: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    """Legalizes a resize, whose extents may be symbolic; the first of two rows or columns is the only one."""
    size = [int(extent) if isinstance(extent, T.IntImm) else extent for extent in node.args[1].values]
    is_single = [isinstance(extent, int) and extent == 1 for extent in size]
    if node.attrs.coordinate_transformation_mode != "align_corners" or not any(is_single):
        return default(builder, node)
    enough = relax.ShapeExpr([2 if single else extent for single, extent in zip(is_single, size, strict=True)])
    resized = builder.normalize(relax.Call(node.op, [node.args[0], enough], node.attrs))
    axes = [node.attrs.layout.index(axis) for axis in "HW"]
    return builder.call_te(topi.strided_slice, builder.emit(default(builder, resized)), [0, 0], size, [1, 1], axes)


LEGALIZE: dict[str, Legalize] = {"relax.image.resize2d": _resize2d}
"""The legalization, by Relax operator."""

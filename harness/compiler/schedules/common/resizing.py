"""Resizes images to one row or column with aligned corners, where TVM divides by the number of pixels less one."""

from __future__ import annotations

from tvm import relax, topi

from harness.compiler.schedules.common.graph import Legalize, default


def _resize2d(builder: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    """Legalizes a resize; the first of two rows or columns is the only one, as in PyTorch."""
    size = [int(extent) for extent in node.args[1].values]
    if node.attrs.coordinate_transformation_mode != "align_corners" or 1 not in size:
        return default(builder, node)
    enough = relax.ShapeExpr([max(extent, 2) for extent in size])
    resized = builder.normalize(relax.Call(node.op, [node.args[0], enough], node.attrs))
    shape = [int(extent) for extent in node.ty.shape]
    return builder.call_te(topi.strided_slice, builder.emit(default(builder, resized)), [0] * len(shape), shape)


LEGALIZE: dict[str, Legalize] = {"relax.image.resize2d": _resize2d}
"""The legalization, by Relax operator."""

"""Works around indexing and scattering: negative indices, several index tensors beside slices, fewer indices."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node
from tvm import relax

from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom
from harness.compiler.lowering.frontends.operators import nonnegative
from harness.compiler.lowering.frontends.rewriting import argument, calls, source_line, value_of

_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
"""PyTorch's reductions → Relax's."""


def _select_from_the_front(module: GraphModule) -> None:
    for node in calls(module, torch.ops.aten.select.int):
        source, dim, index = node.args
        if index < 0:
            node.args = (source, dim, index + value_of(source).shape[dim])


def _indexed_axes(node: Node) -> dict[int, Node]:
    """Returns the index tensors by axis.

    Raises:
        NotImplementedError: An index is boolean.
    """
    indexed = {axis: index for axis, index in enumerate(node.args[1]) if index is not None}
    if any(value_of(index).dtype is torch.bool for index in indexed.values()):
        raise NotImplementedError(f"{node.target}: an index of booleans, whose number of elements depends on the data")
    return indexed


def _convert_index(node: Node, importer: Any) -> Any:
    """Indexes as NumPy does: zips index tensors; their dimensions replace adjacent axes, or else come first."""
    emit, data, shape = importer.block_builder.emit, importer.env[node.args[0]], value_of(node.args[0]).shape
    indexed = _indexed_axes(node)
    axes, indices = (
        list(indexed),
        [emit(nonnegative(importer.env[index], [shape[axis]])) for axis, index in indexed.items()],
    )
    if len(axes) == 1:
        return emit(relax.op.take(data, indices[0], axis=axes[0]))
    further_axes = [axis for axis in range(len(shape)) if axis not in axes]
    front = relax.op.permute_dims(data, [*axes, *further_axes])
    picked = emit(relax.op.index_tensor(front, indices))
    adjacent = axes == list(range(axes[0], axes[0] + len(axes)))
    if not adjacent or axes[0] == 0:
        return picked
    zipped = len(picked.ty.shape) - len(further_axes)
    order = [*range(zipped, zipped + axes[0]), *range(zipped), *range(zipped + axes[0], zipped + len(further_axes))]
    return emit(relax.op.permute_dims(picked, order))


def _convert_index_put(node: Node, importer: Any) -> Any:
    """Scatters rows by the index tensors of the first axes, stacked as `relax.op.scatter_nd` takes them.

    Raises:
        NotImplementedError: An index is boolean, or an axis without index comes before one with an index.
    """
    emit = importer.block_builder.emit
    data, values, shape = importer.env[node.args[0]], importer.env[node.args[2]], list(value_of(node.args[0]).shape)
    indexed = _indexed_axes(node)
    if list(indexed) != list(range(len(indexed))):
        raise NotImplementedError(f"{node.target}: slices before or between the index tensors")
    common = list(torch.broadcast_shapes(*(value_of(index).shape for index in indexed.values())))
    indices = [
        emit(relax.op.broadcast_to(nonnegative(importer.env[index], [shape[axis]]), common))
        for axis, index in indexed.items()
    ]
    values = emit(relax.op.broadcast_to(values, [*common, *shape[len(indexed) :]]))
    stacked = relax.op.stack(indices, axis=len(common))
    return emit(relax.op.scatter_nd(data, stacked, values, "add" if argument(node, "accumulate") else "update"))


def _convert_slice_scatter(node: Node, importer: Any) -> Any:
    data, source = node.args[:2]
    shape = value_of(data).shape
    dim = argument(node, "dim") % len(shape)
    bounds = slice(argument(node, "start"), argument(node, "end"), argument(node, "step")).indices(shape[dim])
    start, end, step = map(relax.prim_value, bounds)
    return importer.block_builder.emit(
        relax.op.slice_scatter(importer.env[data], importer.env[source], start, end, step, axis=dim)
    )


def _scatter(node: Node, importer: Any, reduction: str) -> Any:
    """Scatters along the axis; by coordinates if there are fewer indices along another axis, which TVM gets wrong."""
    emit = importer.block_builder.emit
    x, axis, index, values = node.args[:4]
    counts, source = list(value_of(index).shape), importer.env[values]
    if counts != list(value_of(values).shape):  # PyTorch reads as many values as there are indices
        source = emit(relax.op.strided_slice(source, list(range(len(counts))), [0] * len(counts), counts))
    target, places = importer.env[x], importer.env[index]
    extents, axis = list(value_of(x).shape), axis % max(len(counts), 1)
    if counts[:axis] + counts[axis + 1 :] == extents[:axis] + extents[axis + 1 :]:
        return emit(relax.op.scatter_elements(target, places, source, axis, reduction))
    coordinates = [relax.const(coordinate, "int64") for coordinate in np.indices(counts)]
    coordinates[axis] = places
    return emit(relax.op.scatter_nd(target, relax.op.stack(coordinates, axis=len(counts)), source, reduction))


def _convert_scatter_reduce(node: Node, importer: Any) -> Any:
    reduction, include_self = argument(node, "reduce"), argument(node, "include_self")
    if reduction not in _REDUCTIONS or not include_self:
        raise NotImplementedError(
            f"scatter_reduce with {reduction!r}, include_self={include_self} is not known, "
            f"called at {source_line(node)}: take one of {', '.join(_REDUCTIONS)}, with include_self."
        )
    return _scatter(node, importer, _REDUCTIONS[reduction])


_SCATTERED = (
    torch.zeros(2, 3),
    torch.tensor([[0, 0, 2], [1, 1, 1]]),
    torch.tensor([[1.0, 2.0, 3.0], [-1.0, 4.0, 2.0]]),
)

DEFECTS = (
    Defect(
        name="select_negative_index",
        title="select with a negative index reads memory before the tensor",
        location="ExportedProgramImporter._select",
        description=(
            "x[-1] becomes relax.op.take with the constant -1 in the mode `fast`, which does not check bounds: "
            "the result is whatever lies in memory before the tensor. In SAM 3's segmentation head "
            "obj_queries[-1] picks the last decoder layer that way, so pred_masks were wrong by 4.2 while the "
            "semantic map was right."
        ),
        function=lambda x: x[-1],
        args=(torch.arange(12.0).reshape(3, 4) + 1,),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values from outside the tensor"),
        workaround="A pass that counts the index from the front.",
        passes=(_select_from_the_front,),
    ),
    Defect(
        name="index_negative",
        title="Negative entries of an index tensor read memory before the tensor",
        location="BaseFXGraphImporter._index_tensor",
        description=(
            "x[index] becomes relax.op.take in the mode `fast`, which neither counts from the end nor checks bounds."
        ),
        function=lambda x, index: x[index],
        args=(torch.arange(4.0) + 1, torch.tensor([-1, 0])),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values from outside the tensor"),
        workaround="A converter that adds the size to negative entries.",
        converters={"index.Tensor": _convert_index},
    ),
    Defect(
        name="index_beside_slice",
        title="Two index tensors beside a slice give an outer product",
        location="BaseFXGraphImporter._index_tensor",
        description=(
            "x[:, i, j] takes along each axis in turn, which pairs every entry of i with every entry of j; "
            "PyTorch zips them. The shape of the result is wrong."
        ),
        function=lambda x, index: x[:, index, index],
        args=(torch.arange(18.0).reshape(2, 3, 3), torch.tensor([0, 2])),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="shape [2, 2, 2] instead of [2, 2]"),
        workaround="The converter of index_negative zips them.",
    ),
    Defect(
        name="index_put_fewer_indices",
        title="index_put with fewer index tensors than dimensions is rejected",
        location="BaseFXGraphImporter._index_put",
        description="relax.op.index_put wants one index tensor for each dimension; PyTorch leaves the last ones out.",
        function=lambda x, index: x.index_put((index,), torch.zeros(())),
        args=(torch.ones(3, 2), torch.tensor([0, 2])),
        raw=RawOutcome(Symptom.REJECTED, "ValueError", "to match the data tensor dimensions"),
        workaround="A converter that scatters rows.",
        converters={"index_put.default": _convert_index_put},
    ),
    Defect(
        name="scatter_add",
        title="scatter_add is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="Only scatter without a reduction is in the table of operators.",
        function=lambda x, index, values: x.scatter_add(1, index, values),
        args=_SCATTERED,
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"scatter_add\.default"),
        workaround="A converter.",
        converters={"scatter_add.default": partial(_scatter, reduction="add")},
    ),
    Defect(
        name="scatter_reduce",
        title="scatter_reduce is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="As scatter_add.",
        function=lambda x, index, values: x.scatter_reduce(1, index, values, "amax"),
        args=_SCATTERED,
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"scatter_reduce\.two"),
        workaround="A converter; of `mean`, and without the tensor's own elements, it says that there is none.",
        converters={"scatter_reduce.two": _convert_scatter_reduce},
    ),
    Defect(
        name="scatter_few_indices",
        title="scatter with fewer indices along another axis writes elsewhere",
        location="topi.scatter_elements",
        description="The shape of the indices is taken for that of the data, but for the axis that is scattered along.",
        function=lambda x, index, values: x.scatter(2, index, values),
        args=(torch.zeros(2, 2, 1), torch.zeros(2, 1, 1).long(), torch.ones(2, 1, 1)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="the second value at [0, 1] instead of [1, 0]"),
        workaround="The converter of scatter_add, which then scatters by coordinates.",
        converters={"scatter.src": partial(_scatter, reduction="update")},
    ),
    Defect(
        name="slice_scatter_open",
        title="slice_scatter with an open start is rejected",
        location="BaseFXGraphImporter._slice_scatter",
        description="The default of the start is only filled in where the argument is missing, not where it is None.",
        function=lambda x, source: torch.ops.aten.slice_scatter.default(x, source, 0, None, 2),
        args=(torch.zeros(3), torch.ones(2)),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "Cannot convert None"),
        workaround="A converter that counts both bounds as Python's slices do.",
        converters={"slice_scatter.default": _convert_slice_scatter},
    ),
)

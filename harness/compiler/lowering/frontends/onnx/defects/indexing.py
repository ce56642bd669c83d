"""Works around indexing, scattering and repeating: Gather, GatherND, ScatterND, ScatterElements and Tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import Gather

from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.values import constant_of, shape_of
from harness.compiler.lowering.frontends.operators import nonnegative
from harness.compiler.lowering.frontends.rewriting import calls, insert, overloads, source_line, value_of

_REDUCE = overloads("scatter_reduce scatter_reduce_", "two")
_SCATTER = (*overloads("scatter scatter_", "src"), *overloads("scatter_add scatter_add_", "default"), *_REDUCE)


def _convert_gather(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Converts negative indices to indices from the front, at import if they are constants."""
    if not all(isinstance(value.ty, relax.TensorType) for value in inputs):
        return Gather._impl_v13(builder, inputs, attributes, [{}, {}])
    data, indices = map(builder.normalize, inputs)
    axis = attributes.get("axis", 0) % len(shape_of(data))
    size, constant = shape_of(data)[axis], constant_of(indices)
    if constant is None:
        return relax.op.take(data, nonnegative(indices, [size]), axis)
    places = np.where(constant < 0, constant + size, constant)
    return relax.op.take(data, relax.const(places, str(indices.ty.dtype)), axis)


def _convert_scatter_nd(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    data, indices, updates = map(builder.normalize, inputs)
    indices = nonnegative(indices, shape_of(data)[: shape_of(indices)[-1]])
    reduction = attributes.get("reduction", b"none").decode()
    return relax.op.scatter_nd(data, indices, updates, "update" if reduction == "none" else reduction)


def _convert_gather_nd(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    data, indices = map(builder.normalize, inputs)
    batch_dims = attributes.get("batch_dims", 0)
    extents = shape_of(data)[batch_dims : batch_dims + shape_of(indices)[-1]]
    return relax.op.gather_nd(data, nonnegative(indices, extents), batch_dims)


def _convert_tile(_builder: relax.BlockBuilder, inputs: list[Any], _attributes: dict[str, Any]) -> Any:
    repeats = constant_of(inputs[1])
    if repeats is None:
        raise NotImplementedError("Tile with repeats that are not known before")
    return relax.op.tile(inputs[0], [int(count) for count in repeats])


def _cut_values(module: GraphModule) -> None:
    for node in calls(module, *_SCATTER):
        x, axis, index, values, *rest = node.args
        if node.target in _REDUCE and rest[0] == "mean":
            raise NotImplementedError(
                f"scatter_reduce with 'mean' is not known to PyTorch's ONNX exporter, called at {source_line(node)}: "
                "take a sum, and divide it."
            )
        for dim, count in enumerate(value_of(index).shape):
            if count != value_of(values).shape[dim]:
                values = insert(node, torch.ops.aten.slice.Tensor, values, dim, 0, count)
        node.args = (x, axis, index, values, *rest)


DEFECTS = (
    Defect(
        name="gather_constant",
        title="Gather with a constant index looks at shapes at run time",
        location="tvm.relax.frontend.onnx.onnx_frontend.Gather",
        description=(
            "To count negative indices from the end, the extent of the axis is taken from the tensor's shape at run "
            "time and the index is chosen by a where, also if both are known. The index is no constant then, so that "
            "no kernel reads the chosen part in place: SAM 3's rotary encoding takes query, key and value that way."
        ),
        function=lambda x: x[-2],
        args=(torch.arange(12.0).reshape(3, 4),),
        raw=RawOutcome(Symptom.SLOW, absent="R.take(x, R.const(1", wrong="no relax.take with a constant index"),
        workaround="A converter that counts from the front while it converts.",
        converters={"Gather": _convert_gather},
    ),
    Defect(
        name="scatter_nd_shape",
        title="ScatterND and GatherND look at shapes at run time",
        location="tvm.relax.frontend.onnx.onnx_frontend._coord_axis_extents",
        description=(
            "To count negative indices from the end, the extents are taken from the tensor's shape at run time, though "
            "the importer knows them: three operators that nothing fuses with."
        ),
        function=lambda x, index: x.index_put((index,), torch.zeros(())),
        args=(torch.ones(3, 2), torch.tensor([0, -1])),
        raw=RawOutcome(Symptom.SLOW, absent="R.const(3", wrong="the extent 3 is not in the module"),
        workaround="Converters that add the extents as constants.",
        converters={"ScatterND": _convert_scatter_nd, "GatherND": _convert_gather_nd},
    ),
    Defect(
        name="tile_function",
        title="Tile is imported as a compiled function instead of relax.tile",
        location="tvm.relax.frontend.onnx.onnx_frontend.Tile",
        description="The loops are there from the start, so that no rule for relax.tile applies.",
        function=lambda x: x.repeat(2, 3),
        args=(torch.arange(4.0).reshape(2, 2),),
        raw=RawOutcome(Symptom.SLOW, absent="R.tile(", wrong="no relax.tile in the module"),
        workaround="A converter that emits relax.tile.",
        converters={"Tile": _convert_tile},
    ),
    Defect(
        name="scatter_more_values",
        title="Scattering fewer values than there are is rejected",
        location="torch.onnx, aten_scatter_add",
        description=(
            "PyTorch reads as many values as there are indices along each axis; in ONNX there are as many of both."
        ),
        function=lambda x, index, values: x.scatter_add(1, index, values),
        args=(torch.zeros(2, 3), torch.tensor([[0, 2]]), torch.ones(2, 3)),
        raw=RawOutcome(Symptom.REJECTED, "ValueError", "same shape with updates"),
        workaround=(
            "A pass that cuts the values first. Of `scatter_reduce` with `mean`, which PyTorch's exporter takes for no "
            "reduction at all, it says that there is none."
        ),
        passes=(_cut_values,),
    ),
)

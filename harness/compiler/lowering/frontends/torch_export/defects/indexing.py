"""Works around indexing with tensors: negative indices, and several index tensors next to slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Take(torch.nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index]


class _Zip(torch.nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[:, index, index]


class _Put(torch.nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.index_put((index,), torch.zeros(()))


def _nonnegative_index(index: Any, size: int, emit: Any) -> Any:
    """Returns the index tensor with `size` added to negative entries."""
    from tvm import relax

    dtype = index.ty.dtype.dtype
    negative = emit(relax.op.less(index, relax.const(0, dtype)))
    return emit(relax.op.where(negative, emit(relax.op.add(index, relax.const(size, dtype))), index))


def _indexed_axes(node: Node, indices: Sequence[Any]) -> list[tuple[int, Any]]:
    """Returns the axes that have an index tensor, each with the tensor's node.

    Raises:
        NotImplementedError: An index is boolean.
    """
    axes = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    if any(index.meta["val"].dtype is torch.bool for _, index in axes):
        raise NotImplementedError(f"{node.target}: an index of booleans, whose number of elements depends on the data")
    return axes


def _convert_index(node: Node, importer: Any) -> Any:
    """Indexes as NumPy does: zips index tensors; their dimensions replace adjacent axes, or else come first."""
    from tvm import relax

    emit = importer.block_builder.emit
    data = importer.env[node.args[0]]
    shape = node.args[0].meta["val"].shape
    indexed = _indexed_axes(node, node.args[1])
    axes = [axis for axis, _ in indexed]
    indices = [_nonnegative_index(importer.env[index], shape[axis], emit) for axis, index in indexed]
    if len(indices) == 1:
        return emit(relax.op.take(data, indices[0], axis=axes[0]))
    further_axes = [axis for axis in range(len(shape)) if axis not in axes]
    front = emit(relax.op.permute_dims(data, [*axes, *further_axes]))
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
    from tvm import relax

    emit = importer.block_builder.emit
    data, values = importer.env[node.args[0]], importer.env[node.args[2]]
    shape = list(node.args[0].meta["val"].shape)
    accumulate = bool(node.args[3]) if len(node.args) > 3 else False
    indexed = _indexed_axes(node, node.args[1])
    axes = [axis for axis, _ in indexed]
    if axes != list(range(len(axes))):
        raise NotImplementedError(f"{node.target}: slices before or between the index tensors")
    common = list(torch.broadcast_shapes(*(index.meta["val"].shape for _, index in indexed)))
    row_shape = shape[len(axes) :]
    indices = [
        emit(relax.op.broadcast_to(_nonnegative_index(importer.env[index], shape[axis], emit), common))
        for axis, index in indexed
    ]
    values = emit(relax.op.broadcast_to(values, [*common, *row_shape]))
    stacked = emit(relax.op.stack(indices, axis=len(common)))
    reduction = "add" if accumulate else "update"
    return emit(relax.op.scatter_nd(data, stacked, values, reduction))


DEFECTS = (
    TorchDefect(
        name="index_negative",
        title="Negative entries of an index tensor read memory before the tensor",
        location="BaseFXGraphImporter._index_tensor",
        description=(
            "x[index] becomes relax.op.take in the mode `fast`, which neither counts from the end nor checks bounds."
        ),
        reproduction=lambda: (_Take(), (torch.arange(4.0) + 1, torch.tensor([-1, 0]))),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="values from outside the tensor"),
        workaround="A converter that adds the size to negative entries.",
        converters={"index.Tensor": _convert_index},
    ),
    TorchDefect(
        name="index_beside_slice",
        title="Two index tensors beside a slice give an outer product",
        location="BaseFXGraphImporter._index_tensor",
        description=(
            "x[:, i, j] takes along each axis in turn, which pairs every entry of i with every entry of j; "
            "PyTorch zips them. The shape of the result is wrong."
        ),
        reproduction=lambda: (_Zip(), (torch.arange(18.0).reshape(2, 3, 3), torch.tensor([0, 2]))),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="shape [2, 2, 2] instead of [2, 2]"),
        workaround="The converter of index_negative zips them.",
    ),
    TorchDefect(
        name="index_put_fewer_indices",
        title="index_put with fewer index tensors than dimensions is rejected",
        location="BaseFXGraphImporter._index_put",
        description="relax.op.index_put wants one index tensor for each dimension; PyTorch leaves the last ones out.",
        reproduction=lambda: (_Put(), (torch.ones(3, 2), torch.tensor([0, 2]))),
        raw=RawOutcome(Symptom.REJECTED, "ValueError", "to match the data tensor dimensions"),
        workaround="A converter that scatters rows.",
        converters={"index_put.default": _convert_index_put},
    ),
)

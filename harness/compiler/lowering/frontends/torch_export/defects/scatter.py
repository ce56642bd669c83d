"""Works around scatter_add and scatter_reduce, which the importer does not know, and scatter with few indices."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import argument, source_line
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect

_REDUCTIONS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min"}
"""PyTorch's reductions → Relax's."""


class _Few(torch.nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.scatter(2, index, values)


class _Add(torch.nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.scatter_add(1, index, values)


class _Largest(torch.nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.scatter_reduce(1, index, values, "amax")


def _inputs() -> tuple[torch.Tensor, ...]:
    return torch.zeros(2, 3), torch.tensor([[0, 0, 2], [1, 1, 1]]), torch.tensor([[1.0, 2.0, 3.0], [-1.0, 4.0, 2.0]])


def _convert(node: Node, importer: Any, reduction: str = "add") -> Any:
    """Scatters along the axis; by coordinates if there are fewer indices along another axis, which TVM gets wrong."""
    import numpy as np
    from tvm import relax

    emit = importer.block_builder.emit
    x, axis, index, values = node.args[:4]
    counts, source = list(index.meta["val"].shape), importer.env[values]
    if counts != list(values.meta["val"].shape):  # PyTorch reads as many values as there are indices
        source = emit(relax.op.strided_slice(source, list(range(len(counts))), [0] * len(counts), counts))
    target, places = importer.env[x], importer.env[index]
    extents, axis = list(x.meta["val"].shape), axis % max(len(counts), 1)
    if counts[:axis] + counts[axis + 1 :] == extents[:axis] + extents[axis + 1 :]:
        return emit(relax.op.scatter_elements(target, places, source, axis, reduction))
    coordinates = [relax.const(coordinate, "int64") for coordinate in np.indices(counts)]
    coordinates[axis] = places
    stacked = emit(relax.op.stack(coordinates, axis=len(counts)))
    return emit(relax.op.scatter_nd(target, stacked, source, reduction))


def _convert_reduce(node: Node, importer: Any) -> Any:
    reduction = node.args[4]
    if reduction not in _REDUCTIONS or not argument(node, 5, "include_self", True):
        raise NotImplementedError(
            f"scatter_reduce with {reduction!r}, include_self={argument(node, 5, 'include_self', True)} is not known, "
            f"called at {source_line(node)}: take one of {', '.join(_REDUCTIONS)}, with include_self."
        )
    return _convert(node, importer, _REDUCTIONS[reduction])


def _convert_source(node: Node, importer: Any) -> Any:
    return _convert(node, importer, "update")


DEFECTS = (
    TorchDefect(
        name="scatter_add",
        title="scatter_add is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="Only scatter without a reduction is in the table of operators.",
        reproduction=lambda: (_Add(), _inputs()),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"scatter_add\.default"),
        workaround="A converter.",
        converters={"scatter_add.default": _convert},
    ),
    TorchDefect(
        name="scatter_reduce",
        title="scatter_reduce is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="As scatter_add.",
        reproduction=lambda: (_Largest(), _inputs()),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"scatter_reduce\.two"),
        workaround="A converter; of `mean`, and without the tensor's own elements, it says that there is none.",
        converters={"scatter_reduce.two": _convert_reduce},
    ),
    TorchDefect(
        name="scatter_few_indices",
        title="scatter with fewer indices along another axis writes elsewhere",
        location="topi.scatter_elements",
        description="The shape of the indices is taken for that of the data, but for the axis that is scattered along.",
        reproduction=lambda: (_Few(), (torch.zeros(2, 2, 1), torch.zeros(2, 1, 1).long(), torch.ones(2, 1, 1))),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="the second value at [0, 1] instead of [1, 0]"),
        workaround="The converter of scatter_add, which then scatters by coordinates.",
        converters={"scatter.src": _convert_source},
    ),
)

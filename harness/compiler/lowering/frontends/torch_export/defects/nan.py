"""Works around the loss of NaN, and extremes over a dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends import nan
from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import argument
from harness.compiler.lowering.frontends.torch_export.defect import Converter, TorchDefect


class _Amax(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.amax(-1), x.amin((0, 1))


class _Max(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = x.max(-1)
        return values, indices


def _extreme(reduce: Callable[..., Any]) -> Converter:
    def convert(node: Node, importer: Any) -> Any:
        axes = argument(node, 1, "dim", [])
        axes = None if axes == [] else axes
        keepdim = bool(argument(node, 2, "keepdim", False))
        return importer.block_builder.emit(reduce(importer.env[node.args[0]], axes, keepdim))

    return convert


def _with_index(reduce: Callable[..., Any], find: Callable[..., Any]) -> Converter:
    def convert(node: Node, importer: Any) -> Any:
        from tvm import relax

        emit, value = importer.block_builder.emit, importer.env[node.args[0]]
        axis, keepdim = argument(node, 1, "dim"), bool(argument(node, 2, "keepdim", False))
        return emit(relax.Tuple([emit(reduce(value, axis, keepdim)), emit(find(value, axis, keepdim))]))

    return convert


def _converters() -> dict[str, Converter]:
    from tvm import relax

    return {
        "amax.default": _extreme(relax.op.max),
        "amin.default": _extreme(relax.op.min),
    }


def _index_converters() -> dict[str, Converter]:
    from tvm import relax

    return {
        "max.dim": _with_index(relax.op.max, relax.op.argmax),
        "min.dim": _with_index(relax.op.min, relax.op.argmin),
    }


_NAN_DEFECTS = (nan.RELU, nan.ELU, nan.MAXIMUM, nan.MINIMUM, nan.HARDTANH, nan.RELU6, nan.MAX_POOL, nan.MAX)

DEFECTS = (
    *(TorchDefect(**lost.facts) for lost in _NAN_DEFECTS),
    *(TorchDefect(**facts) for facts in (nan.INFINITY, *nan.INDICES, *nan.SORTS, nan.MEDIAN)),
    TorchDefect(
        name="amax",
        title="amax and amin are not known",
        location="ExportedProgramImporter.create_convert_map",
        description="They are missing from the table of operators, although max of everything is there.",
        reproduction=lambda: (_Amax(), (torch.tensor([[1.0, 3.0], [2.0, 0.0]]),)),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"amax\.default"),
        workaround="Converters.",
        converters=_converters(),
    ),
    TorchDefect(
        name="max_of_dimension",
        title="max over a dimension overlooks NaN",
        location="BaseFXGraphImporter._max_dim",
        description="It is imported as the first of a descending sort, whose order NaN breaks.",
        reproduction=lambda: (_Max(), (torch.tensor([[2.0, float("nan"), 3.0]]),)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="3 instead of NaN"),
        workaround="Converters that reduce twice, for the value and for its index.",
        converters=_index_converters(),
    ),
)

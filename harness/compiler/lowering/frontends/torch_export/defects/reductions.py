"""Works around prod over a dimension, any over all elements, and any of numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import argument
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Product(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.prod(-1)


class _AnyNonzero(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.any(-1)


class _AnyTrue(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.any()


def _convert_prod(node: Node, importer: Any) -> Any:
    from tvm import relax

    dtype = importer._convert_data_type(node.meta["val"].dtype)
    value = importer.block_builder.emit(relax.op.astype(importer.env[node.args[0]], dtype))
    return importer.block_builder.emit(relax.op.prod(value, node.args[1], bool(argument(node, 2, "keepdim", False))))


def _convert_any(node: Node, importer: Any) -> Any:
    from tvm import relax

    emit = importer.block_builder.emit
    value = emit(relax.op.astype(importer.env[node.args[0]], "bool"))
    dims = argument(node, 1, "dim")
    dims = None if dims == [] else dims
    maximum = relax.op.max(emit(relax.op.astype(value, "int8")), dims, bool(argument(node, 2, "keepdim", False)))
    return emit(relax.op.astype(emit(maximum), "bool"))


DEFECTS = (
    TorchDefect(
        name="prod_over_dimension",
        title="prod over a dimension is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="Only the product of all elements is in the table of operators.",
        reproduction=lambda: (_Product(), (torch.ones(2, 3),)),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"prod\.dim_int"),
        workaround="A converter.",
        converters={"prod.dim_int": _convert_prod},
    ),
    TorchDefect(
        name="any_of_everything",
        title="any without a dimension is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="Only any over given dimensions is in the table of operators.",
        reproduction=lambda: (_AnyTrue(), (torch.tensor([True, False]),)),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"any\.default"),
        workaround="A converter.",
        converters={"any.default": _convert_any},
    ),
    TorchDefect(
        name="any_of_numbers",
        title="any of numbers returns the largest number",
        location="BaseFXGraphImporter._any",
        description=(
            "For other dtypes than bool the maximum is returned as it is: a number instead of a boolean, 0 for "
            "negative ones."
        ),
        reproduction=lambda: (_AnyNonzero(), (torch.tensor([[0.0, -2.0], [0.0, 0.0]]),)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="float32 instead of bool"),
        workaround="A converter that compares with zero first.",
        converters={"any.dim": _convert_any, "any.dims": _convert_any},
    ),
)

"""Works around reductions and sorts: overloads that the importer does not know, and the loss of NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from tvm import relax

from harness.compiler.lowering.frontends.backend_defects import LOST_NAN, lost_nan, lost_order
from harness.compiler.lowering.frontends.defect import Converter, Defect, RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import argument, value_of


def _convert_prod(node: Node, importer: Any) -> Any:
    value = relax.op.astype(importer.env[node.args[0]], importer._convert_data_type(value_of(node).dtype))
    return importer.block_builder.emit(relax.op.prod(value, node.args[1], argument(node, "keepdim")))


def _convert_any(node: Node, importer: Any) -> Any:
    is_whole = node.target is torch.ops.aten.any.default
    dims, keepdim = ([], False) if is_whole else (argument(node, "dim"), argument(node, "keepdim"))
    value = relax.op.astype(relax.op.astype(importer.env[node.args[0]], "bool"), "int8")
    maximum = relax.op.max(value, None if dims == [] else dims, keepdim)
    return importer.block_builder.emit(relax.op.astype(maximum, "bool"))


def _extreme(reduce: Callable[..., Any]) -> Converter:
    def convert(node: Node, importer: Any) -> Any:
        value, axes, keepdim = importer.env[node.args[0]], argument(node, "dim"), argument(node, "keepdim")
        return importer.block_builder.emit(reduce(value, None if axes == [] else axes, keepdim))

    return convert


def _with_index(reduce: Callable[..., Any], find: Callable[..., Any]) -> Converter:
    def convert(node: Node, importer: Any) -> Any:
        emit, value = importer.block_builder.emit, importer.env[node.args[0]]
        axis, keepdim = argument(node, "dim"), argument(node, "keepdim")
        return emit(relax.Tuple([emit(reduce(value, axis, keepdim)), emit(find(value, axis, keepdim))]))

    return convert


def _convert_sort(node: Node, importer: Any) -> Any:
    emit, value = importer.block_builder.emit, importer.env[node.args[0]]
    dim = argument(node, "dim")
    indices = emit(relax.op.argsort(value, dim, argument(node, "descending"), dtype="int64"))
    return emit(relax.Tuple([emit(relax.op.gather_elements(value, indices, axis=dim)), indices]))


DEFECTS = (
    Defect(
        name="prod_over_dimension",
        title="prod over a dimension is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="Only the product of all elements is in the table of operators.",
        function=lambda x: x.prod(-1),
        args=(torch.ones(2, 3),),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"prod\.dim_int"),
        workaround="A converter.",
        converters={"prod.dim_int": _convert_prod},
    ),
    Defect(
        name="any_of_everything",
        title="any without a dimension is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="Only any over given dimensions is in the table of operators.",
        function=lambda x: x.any(),
        args=(torch.tensor([True, False]),),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"any\.default"),
        workaround="A converter.",
        converters={"any.default": _convert_any},
    ),
    Defect(
        name="any_of_numbers",
        title="any of numbers returns the largest number",
        location="BaseFXGraphImporter._any",
        description=(
            "For other dtypes than bool the maximum is returned as it is: a number instead of a boolean, 0 for "
            "negative ones."
        ),
        function=lambda x: x.any(-1),
        args=(torch.tensor([[0.0, -2.0], [0.0, 0.0]]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="float32 instead of bool"),
        workaround="A converter that compares with zero first.",
        converters={"any.dim": _convert_any, "any.dims": _convert_any},
    ),
    Defect(
        name="stable_sort",
        title="sort(stable=True) is not known",
        location="ExportedProgramImporter.create_convert_map",
        description="The overload is missing from the table of operators, although TVM's sort on the CPU is stable.",
        function=lambda x: torch.sort(x, dim=1, stable=True),
        args=(torch.tensor([[1, 0, 1, 0]]),),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"sort\.stable"),
        workaround="A converter.",
        converters={"sort.stable": _convert_sort},
    ),
    *LOST_NAN,
    lost_nan("hardtanh", lambda x: torch.nn.functional.hardtanh(x), "1 instead of NaN"),
    lost_nan("relu6", lambda x: torch.nn.functional.relu6(x), "6 instead of NaN"),
    lost_nan("max", lambda x: x.max(), "2 instead of NaN", operator="max over everything"),
    lost_order("median", lambda x: torch.median(x, -1), "1 instead of NaN", row=(math.nan, 2.0, 1.0)),
    Defect(
        name="amax",
        title="amax and amin are not known",
        location="ExportedProgramImporter.create_convert_map",
        description="They are missing from the table of operators, although max of everything is there.",
        function=lambda x: (x.amax(-1), x.amin((0, 1))),
        args=(torch.tensor([[1.0, 3.0], [2.0, 0.0]]),),
        raw=RawOutcome(Symptom.REJECTED, "AssertionError", r"amax\.default"),
        workaround="Converters.",
        converters={"amax.default": _extreme(relax.op.max), "amin.default": _extreme(relax.op.min)},
    ),
    Defect(
        name="max_of_dimension",
        title="max over a dimension overlooks NaN",
        location="BaseFXGraphImporter._max_dim",
        description="It is imported as the first of a descending sort, whose order NaN breaks.",
        function=lambda x: x.max(-1),
        args=(torch.tensor([[2.0, math.nan, 3.0]]),),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="3 instead of NaN"),
        workaround="Converters that reduce twice, for the value and for its index.",
        converters={
            "max.dim": _with_index(relax.op.max, relax.op.argmax),
            "min.dim": _with_index(relax.op.min, relax.op.argmin),
        },
    ),
)

"""Defines a defect between PyTorch's ONNX exporter and Relax as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.compiler.lowering.frontends.defect import Defect

if TYPE_CHECKING:
    import onnx_ir
    import torch
    import tvm

Converter = Callable[["tvm.relax.BlockBuilder", "list[Any]", dict[str, Any]], "tvm.relax.Expr"]
"""Takes the block builder, the node's inputs (None if omitted) and its attributes, and returns the expression."""

Translation = Callable[..., Any]
"""Takes an operator's arguments as ONNX values, returns the result in ONNX operators (`custom_translation_table`)."""

ProgramPass = Callable[["torch.fx.GraphModule"], None]
"""Rewrites the exported program's graph in place, before PyTorch's exporter; every new node carries `meta["val"]`."""

ModelPass = Callable[["onnx_ir.Model"], None]
"""Rewrites the lifted ONNX model in place, before the import."""


@dataclass(frozen=True)
class OnnxDefect(Defect):
    """One defect on the route through ONNX, and its workaround.

    Attributes:
        converters: Importer functions that replace TVM's, by ONNX operator.
        translations: Functions that replace translations of PyTorch's exporter, by PyTorch's operator.
        program_passes: Rewrites of the exported program before PyTorch's ONNX exporter.
        passes: Rewrites of the ONNX model before the import.
    """

    converters: Mapping[str, Converter] = field(default_factory=dict)
    translations: Mapping[Callable[..., Any], Translation] = field(default_factory=dict)
    program_passes: tuple[ProgramPass, ...] = ()
    passes: tuple[ModelPass, ...] = ()

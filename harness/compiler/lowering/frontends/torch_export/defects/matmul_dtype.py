"""Works around matrix products of other dtypes than float32."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import value_of
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect


class _Product(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y


class _Linear(torch.nn.Module):
    def forward(self, bias: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.addmm(bias, x, y)


def _double(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) / 3


def _matmul(importer: Any, node: Node, a: Node, b: Node) -> Any:
    """Multiplies in the result's dtype; half precision is summed in float32, as in TVM's importer, and rounded once."""
    from tvm import relax

    dtype = value_of(node).dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    emit = importer.block_builder.emit
    product = emit(relax.op.matmul(importer.env[a], importer.env[b], out_dtype=importer._convert_data_type(wide)))
    return product if wide == dtype else emit(relax.op.astype(product, importer._convert_data_type(dtype)))


def _convert_matmul(node: Node, importer: Any) -> Any:
    return _matmul(importer, node, *node.args[:2])


def _convert_addmm(node: Node, importer: Any) -> Any:
    from tvm import relax

    if value_of(node).dtype == torch.float32:
        return importer._addmm(node)
    emit, dtype = importer.block_builder.emit, importer._convert_data_type(value_of(node).dtype)
    bias, a, b = node.args
    terms = []
    for factor, term in (
        (node.kwargs.get("beta", 1), importer.env[bias]),
        (node.kwargs.get("alpha", 1), _matmul(importer, node, a, b)),
    ):
        # a factor of 0 drops the term, even NaN
        if factor != 0:
            terms.append(term if factor == 1 else emit(relax.op.multiply(term, relax.const(factor, dtype))))
    if not terms:
        return emit(relax.op.zeros(list(value_of(node).shape), dtype))
    total = terms[0] if len(terms) == 1 else emit(relax.op.add(*terms))
    return emit(relax.op.broadcast_to(total, list(value_of(node).shape))) if len(terms) == 1 else total


DEFECTS = (
    TorchDefect(
        name="matmul_float32",
        title="A matrix product of float64 or of integers becomes float32",
        location="ExportedProgramImporter.create_convert_map",
        description=(
            "mm, bmm and matmul are imported with out_dtype=float32 whatever the operands are: half of the digits of a "
            "float64 product are lost, and the dtype of the result is not PyTorch's."
        ),
        reproduction=lambda: (_Product(), (_double(2, 3), _double(3, 2))),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="a float32 result"),
        workaround="Converters that ask for the result's dtype.",
        converters=dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), _convert_matmul),
    ),
    TorchDefect(
        name="addmm_float64",
        title="addmm of float64 is rejected",
        location="BaseFXGraphImporter._addmm",
        description="The product is float32, as in matmul_float32, and does not add to a float64 bias.",
        reproduction=lambda: (_Linear(), (_double(2), _double(2, 3), _double(3, 2))),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "float64"),
        workaround="A converter that asks for the result's dtype.",
        converters={"addmm.default": _convert_addmm},
    ),
)

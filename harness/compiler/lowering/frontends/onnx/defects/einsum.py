"""Works around the import of Einsum as plain loops instead of a matrix product."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect
from harness.compiler.lowering.frontends.onnx.rewriting import shape_of

if TYPE_CHECKING:
    from tvm import relax


class _Masks(torch.nn.Module):
    def forward(self, queries: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bqc,bchw->bqhw", queries, pixels)


def _reproduction() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return _Masks(), (torch.randn(1, 3, 4, generator=generator), torch.randn(1, 4, 5, 6, generator=generator))


def _convert(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Multiplies two operands as [batch, rows, terms] and [batch, terms, columns]."""
    from tvm import relax
    from tvm.relax.frontend.onnx.onnx_frontend import Einsum

    operands, _, result = attributes["equation"].decode().replace(" ", "").partition("->")
    left, _, right = operands.partition(",")
    is_product = (
        len(inputs) == 2
        and (left + right + result).isalpha()
        and all(len(set(letters)) == len(letters) for letters in (left, right, result))
        and set(left) ^ set(right) <= set(result) <= set(left) | set(right)
    )
    if not is_product:
        return Einsum._impl_v12(builder, inputs, attributes, [{}, {}])
    left_operand, right_operand = builder.normalize(inputs[0]), builder.normalize(inputs[1])
    sizes = dict(zip(left + right, shape_of(left_operand) + shape_of(right_operand), strict=True))
    shared = [letter for letter in left if letter in right]
    batch, terms = [c for c in shared if c in result], [c for c in shared if c not in result]
    rows, columns = [c for c in left if c not in right], [c for c in right if c not in left]

    def arrange(operand: relax.Expr, letters: str, *groups: list[str]) -> relax.Expr:
        order = [letters.index(letter) for group in groups for letter in group]
        moved = operand if order == sorted(order) else relax.op.permute_dims(operand, order)
        return relax.op.reshape(moved, [math.prod(sizes[letter] for letter in group) for group in groups])

    product = relax.op.matmul(
        arrange(left_operand, left, batch, rows, terms), arrange(right_operand, right, batch, terms, columns)
    )
    letters = [*batch, *rows, *columns]
    unfolded = relax.op.reshape(product, [sizes[letter] for letter in letters])
    order = [letters.index(letter) for letter in result]
    return unfolded if order == sorted(order) else relax.op.permute_dims(unfolded, order)


DEFECTS = (
    OnnxDefect(
        name="einsum_loops",
        title="Einsum is imported as loops of its own instead of a matrix product",
        location="tvm.relax.frontend.onnx.onnx_frontend.Einsum",
        description=(
            "The converter calls a compiled function of plain loops, which sum one term after the other. No rule for "
            "products applies. SAM 3's masks are such a product, of 200 queries with 82,944 pixels."
        ),
        reproduction=_reproduction,
        raw=RawOutcome(Symptom.SLOW, absent="R.matmul(", wrong="no relax.matmul in the module"),
        workaround="A converter that arranges two operands for relax.matmul and the result as it should be.",
        converters={"Einsum": _convert},
    ),
)

"""Works around the decomposition of scaled dot-product attention into single operations on the score matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.rewriting import argument
from harness.compiler.lowering.frontends.torch_export.defect import TorchDefect

UNDECOMPOSED = (torch.ops.aten.scaled_dot_product_attention.default,)
"""Operators that are not decomposed."""


class _Attention(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def _reproduction() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return _Attention(), tuple(torch.randn(1, 2, 4, 8, generator=generator) for _ in range(3))


def _four_dimensions(shape: tuple[int, ...]) -> list[int]:
    """Returns the shape [..., length, width] as [batch, heads, length, width]."""
    leading = shape[:-2]
    return [math.prod(leading[:-1]), *(leading[-1:] or (1,)), *shape[-2:]]


def _convert(node: Node, importer: Any) -> Any:
    from tvm import relax

    emit = importer.block_builder.emit
    if argument(node, 4, "dropout_p", 0.0):
        raise NotImplementedError("scaled_dot_product_attention: dropout")
    shapes = [tuple(operand.meta["val"].shape) for operand in node.args[:3]]
    leading = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    if node.kwargs.get("enable_gqa", False) or any(shape[:-2] != leading for shape in shapes):
        raise NotImplementedError("scaled_dot_product_attention: operands with different numbers of heads")
    operands = []
    for operand, shape in zip(node.args[:3], shapes, strict=True):
        value = importer.env[operand]
        if len(shape) != 4:
            value = emit(relax.op.reshape(value, _four_dimensions(shape)))
        operands.append(emit(relax.op.permute_dims(value, [0, 2, 1, 3])))
    batch, heads, length, _ = _four_dimensions(shapes[0])
    bias = _bias(node, importer, batch, heads, (length, shapes[1][-2]))
    scale = node.kwargs.get("scale")
    result = emit(
        relax.op.nn.attention(
            *operands,
            bias=bias,
            scale=None if scale is None else float(scale),
            causal_mask="TopLeft" if argument(node, 5, "is_causal", False) else None,
        )
    )
    result = emit(relax.op.permute_dims(result, [0, 2, 1, 3]))
    shape = tuple(node.meta["val"].shape)
    return result if len(shape) == 4 else emit(relax.op.reshape(result, shape))


def _bias(node: Node, importer: Any, batch: int, heads: int, scores: tuple[int, int]) -> Any:
    """Returns the mask as an additive bias, [batch or 1, heads or 1, queries, keys]; False becomes -inf, True 0."""
    from tvm import relax

    mask = argument(node, 3, "attn_mask")
    if mask is None:
        return None
    emit = importer.block_builder.emit
    value = importer.env[mask]
    shape = tuple(mask.meta["val"].shape)
    if mask.meta["val"].dtype is torch.bool:
        value = emit(relax.op.where(value, relax.const(0.0, "float32"), relax.const(-math.inf, "float32")))
    leading = tuple(node.args[0].meta["val"].shape[:-2])
    if len(leading) != 2:
        value = emit(relax.op.broadcast_to(value, [*leading, *scores]))
        return emit(relax.op.reshape(value, [batch, heads, *scores]))
    shape = (1,) * (4 - len(shape)) + shape
    value = emit(relax.op.reshape(value, shape))
    return emit(relax.op.broadcast_to(value, [*shape[:2], *scores]))


DEFECTS = (
    TorchDefect(
        name="attention_decomposed",
        title="Attention is imported as single operations on the score matrix",
        location="from_exported_program(run_ep_decomposition=True)",
        description=(
            "PyTorch's decomposition guards the softmax against rows that are masked entirely: comparison with "
            "-inf, negation, any, a matrix of zeros and a where, each over the whole score matrix, which in SAM "
            "3's global blocks has 430 million elements. Without the decomposition, TVM's converter rejects "
            "boolean masks."
        ),
        reproduction=_reproduction,
        raw=RawOutcome(Symptom.SLOW, absent="R.nn.attention", wrong="no relax.nn.attention in the module"),
        workaround="The operator is kept whole, and a converter maps it to relax.nn.attention, with masks as a bias.",
        converters={"scaled_dot_product_attention.default": _convert},
    ),
)

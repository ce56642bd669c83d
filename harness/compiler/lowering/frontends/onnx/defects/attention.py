"""Works around the lookup of ONNX's Attention as another operator of the same name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from harness.compiler.lowering.frontends.defect import RawOutcome, Symptom
from harness.compiler.lowering.frontends.onnx.defect import OnnxDefect

if TYPE_CHECKING:
    from tvm import relax

_UNSUPPORTED_ATTRIBUTES = ("softcap", "qk_matmul_output_mode", "q_num_heads", "kv_num_heads")
"""Attributes that PyTorch's exporter does not set for scaled_dot_product_attention."""


class _Attention(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)


def _reproduction() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[[[True, True, False, True]]]])
    return _Attention(), (*(torch.randn(1, 2, 4, 8, generator=generator) for _ in range(3)), mask)


def _convert(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Converts attention; operands and result are [batch, heads, length, width]."""
    from tvm import relax

    query, key, value, mask, *further_inputs = [*map(builder.normalize, inputs[:3]), *inputs[3:], None]
    shapes = [[int(extent) for extent in operand.ty.shape] for operand in (query, key, value)]
    unsupported = [name for name in _UNSUPPORTED_ATTRIBUTES if attributes.get(name)]
    if (
        unsupported
        or any(further_input is not None for further_input in further_inputs)
        or len(shapes[0]) != 4
        or attributes["tvm_custom"]["num_outputs"] > 1
    ):
        raise NotImplementedError(f"Attention with {', '.join(unsupported) or 'past keys, or of three dimensions'}")
    if any(shape[:2] != shapes[0][:2] for shape in shapes):
        raise NotImplementedError("Attention: operands with different numbers of heads")
    operands = [relax.op.permute_dims(operand, [0, 2, 1, 3]) for operand in (query, key, value)]
    scale = attributes.get("scale")
    result = relax.op.nn.attention(
        *operands,
        bias=None if mask is None else _bias(builder.normalize(mask), shapes[0][2], shapes[1][2]),
        scale=None if scale is None else float(scale),
        causal_mask="TopLeft" if attributes.get("is_causal") else None,
    )
    return relax.op.permute_dims(result, [0, 2, 1, 3])


def _bias(mask: relax.Expr, queries: int, keys: int) -> relax.Expr:
    """Returns the mask as an additive bias, [batch or 1, heads or 1, queries, keys]; False becomes -inf, True 0."""
    from tvm import relax

    shape = [int(extent) for extent in mask.ty.shape]
    if str(mask.ty.dtype) == "bool":
        mask = relax.op.where(mask, relax.const(0.0, "float32"), relax.const(-math.inf, "float32"))
    shape = [1] * (4 - len(shape)) + shape
    return relax.op.broadcast_to(relax.op.reshape(mask, shape), [*shape[:2], queries, keys])


DEFECTS = (
    OnnxDefect(
        name="attention_domain",
        title="Attention of ONNX is taken for onnxruntime's operator of the same name",
        location="ONNXGraphImporter._convert_operator",
        description=(
            "Operators are looked up by name without their domain. Under the name Attention there is a converter for "
            "com.microsoft's, which has other inputs and attributes; ONNX's own, which PyTorch exports since opset 23, "
            "is handed to it. Up to opset 22 the exporter writes products and a softmax instead."
        ),
        reproduction=_reproduction,
        raw=RawOutcome(Symptom.REJECTED, "KeyError", "num_heads"),
        workaround="A converter that maps it to relax.nn.attention, with masks as a bias.",
        converters={"Attention": _convert},
    ),
)

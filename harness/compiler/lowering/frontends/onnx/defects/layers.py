"""Works around layers: attention, products written as Einsum, and group normalization."""

from __future__ import annotations

import math
from typing import Any

import torch
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import Einsum

from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom, normal
from harness.compiler.lowering.frontends.onnx.values import shape_of
from harness.compiler.lowering.frontends.operators import attention, attention_bias

_UNSUPPORTED_ATTRIBUTES = ("softcap", "qk_matmul_output_mode", "q_num_heads", "kv_num_heads")
"""Attributes that PyTorch's exporter does not set for scaled_dot_product_attention."""


def _convert_attention(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Converts attention; operands and result are [batch, heads, length, width]."""
    query, key, value, mask, *further_inputs = [*map(builder.normalize, inputs[:3]), *inputs[3:], None]
    shapes = [shape_of(operand) for operand in (query, key, value)]
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
    bias = None
    if mask is not None:
        mask = builder.normalize(mask)
        bias = attention_bias(mask, shape_of(mask), shapes[0][2], shapes[1][2])
    return attention((query, key, value), bias, attributes.get("scale"), bool(attributes.get("is_causal")))


def _convert_einsum(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Multiplies two operands as [batch, rows, terms] and [batch, terms, columns]."""
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


def _convert_group_norm(builder: relax.BlockBuilder, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    data = builder.normalize(inputs[0])
    axes = list(range(2, len(shape_of(data))))
    return relax.op.nn.group_norm(
        data, *inputs[1:], attributes["num_groups"], channel_axis=1, axes=axes, epsilon=attributes.get("epsilon", 1e-5)
    )


DEFECTS = (
    Defect(
        name="attention_domain",
        title="Attention of ONNX is taken for onnxruntime's operator of the same name",
        location="ONNXGraphImporter._convert_operator",
        description=(
            "Operators are looked up by name without their domain. Under the name Attention there is a converter for "
            "com.microsoft's, which has other inputs and attributes; ONNX's own, which PyTorch exports since opset 23, "
            "is handed to it. Up to opset 22 the exporter writes products and a softmax instead."
        ),
        function=lambda query, key, value, mask: torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask
        ),
        args=(*normal(*[(1, 2, 4, 8)] * 3), torch.tensor([[[[True, True, False, True]]]])),
        raw=RawOutcome(Symptom.REJECTED, "KeyError", "num_heads"),
        workaround="A converter that maps it to relax.nn.attention, with masks as a bias.",
        converters={"Attention": _convert_attention},
    ),
    Defect(
        name="einsum_loops",
        title="Einsum is imported as loops of its own instead of a matrix product",
        location="tvm.relax.frontend.onnx.onnx_frontend.Einsum",
        description=(
            "The converter calls a compiled function of plain loops, which sum one term after the other. No rule for "
            "products applies. SAM 3's masks are such a product, of 200 queries with 82,944 pixels."
        ),
        function=lambda queries, pixels: torch.einsum("bqc,bchw->bqhw", queries, pixels),
        args=normal((1, 3, 4), (1, 4, 5, 6)),
        raw=RawOutcome(Symptom.SLOW, absent="R.matmul(", wrong="no relax.matmul in the module"),
        workaround="A converter that arranges two operands for relax.matmul and the result as it should be.",
        converters={"Einsum": _convert_einsum},
    ),
    Defect(
        name="group_norm_apart",
        title="Weight and bias of GroupNormalization are applied by operators behind it",
        location="tvm.relax.frontend.onnx.onnx_frontend.GroupNormalization",
        description=(
            "Since opset 21 they are one for each channel, as relax.nn.group_norm takes them; the converter gives that "
            "ones and zeros instead, and multiplies and adds afterwards."
        ),
        function=lambda x, weight, bias: torch.nn.functional.group_norm(x, 2, weight, bias),
        args=normal((1, 4, 3, 3), (4,), (4,)),
        raw=RawOutcome(
            Symptom.SLOW, absent="R.nn.group_norm(x, weight, bias", wrong="no weight in relax.nn.group_norm"
        ),
        workaround="A converter that hands them on.",
        converters={"GroupNormalization": _convert_group_norm},
    ),
)

"""Works around layers: attention, group normalization, maximum pooling, and products of other dtypes than float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from tvm import relax

from harness.compiler.lowering.frontends.defect import Defect, RawOutcome, Symptom, normal
from harness.compiler.lowering.frontends.operators import additive_mask, attention, attention_bias
from harness.compiler.lowering.frontends.rewriting import argument, calls, overloads, value_of


def _four_dimensions(shape: tuple[int, ...]) -> list[int]:
    """Returns the shape [..., length, width] as [batch, heads, length, width]."""
    leading = shape[:-2]
    return [math.prod(leading[:-1]), *(leading[-1:] or (1,)), *shape[-2:]]


def _convert_attention(node: Node, importer: Any) -> Any:
    emit = importer.block_builder.emit
    if argument(node, "dropout_p"):
        raise NotImplementedError("scaled_dot_product_attention: dropout")
    shapes = [tuple(value_of(operand).shape) for operand in node.args[:3]]
    leading = torch.broadcast_shapes(*(shape[:-2] for shape in shapes))
    if argument(node, "enable_gqa") or any(shape[:-2] != leading for shape in shapes):
        raise NotImplementedError("scaled_dot_product_attention: operands with different numbers of heads")
    operands = [importer.env[operand] for operand in node.args[:3]]
    is_four_dimensional = len(leading) == 2
    if not is_four_dimensional:
        operands = [
            relax.op.reshape(value, _four_dimensions(shape)) for value, shape in zip(operands, shapes, strict=True)
        ]
    bias, mask = None, argument(node, "attn_mask")
    if mask is not None:
        scores = (shapes[0][-2], shapes[1][-2])
        if is_four_dimensional:
            bias = attention_bias(importer.env[mask], value_of(mask).shape, *scores)
        else:
            whole = relax.op.broadcast_to(additive_mask(importer.env[mask]), [*leading, *scores])
            bias = relax.op.reshape(whole, _four_dimensions((*leading, *scores)))
    result = emit(attention(operands, bias, argument(node, "scale"), argument(node, "is_causal")))
    return result if is_four_dimensional else emit(relax.op.reshape(result, tuple(value_of(node).shape)))


def _convert_group_norm(node: Node, importer: Any) -> Any:
    x, weight, bias, _, channels, _, groups, epsilon = importer.retrieve_args(node)
    dtype = x.ty.dtype.dtype
    return importer.block_builder.emit(
        relax.op.nn.group_norm(
            x,
            relax.const(np.ones(channels), dtype) if weight is None else weight,
            relax.const(np.zeros(channels), dtype) if bias is None else bias,
            num_groups=groups,
            channel_axis=1,
            axes=list(range(2, len(x.ty.shape))),
            epsilon=epsilon,
        )
    )


_POOLS = overloads("max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices", "default")


def _fill_strides(module: torch.fx.GraphModule) -> None:
    for node in calls(module, *_POOLS):
        if not argument(node, "stride"):
            size = argument(node, "kernel_size")
            node.args = (*node.args[:2], size, *node.args[3:])


def _double(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + math.prod(shape), dtype=torch.float64).reshape(shape) / 3


def _matmul(importer: Any, node: Node, a: Node, b: Node) -> Any:
    """Multiplies in the result's dtype; half precision is summed in float32, as in TVM's importer, and rounded once."""
    dtype = value_of(node).dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    emit = importer.block_builder.emit
    product = emit(relax.op.matmul(importer.env[a], importer.env[b], out_dtype=importer._convert_data_type(wide)))
    return product if wide == dtype else emit(relax.op.astype(product, importer._convert_data_type(dtype)))


def _convert_matmul(node: Node, importer: Any) -> Any:
    return _matmul(importer, node, *node.args[:2])


def _convert_addmm(node: Node, importer: Any) -> Any:
    if value_of(node).dtype == torch.float32:
        return importer._addmm(node)
    emit, dtype = importer.block_builder.emit, importer._convert_data_type(value_of(node).dtype)
    shape = list(value_of(node).shape)
    bias, a, b = node.args
    terms = []
    for name, term in (("beta", importer.env[bias]), ("alpha", _matmul(importer, node, a, b))):
        factor = argument(node, name)
        # a factor of 0 drops the term, even NaN
        if factor != 0:
            terms.append(term if factor == 1 else emit(relax.op.multiply(term, relax.const(factor, dtype))))
    if not terms:
        return emit(relax.op.zeros(shape, dtype))
    return emit(relax.op.add(*terms) if len(terms) > 1 else relax.op.broadcast_to(terms[0], shape))


DEFECTS = (
    Defect(
        name="attention_decomposed",
        title="Attention is imported as single operations on the score matrix",
        location="from_exported_program(run_ep_decomposition=True)",
        description=(
            "PyTorch's decomposition guards the softmax against rows that are masked entirely: comparison with "
            "-inf, negation, any, a matrix of zeros and a where, each over the whole score matrix, which in SAM "
            "3's global blocks has 430 million elements. Without the decomposition, TVM's converter rejects "
            "boolean masks."
        ),
        function=lambda query, key, value: torch.nn.functional.scaled_dot_product_attention(query, key, value),
        args=normal(*[(1, 2, 4, 8)] * 3),
        raw=RawOutcome(Symptom.SLOW, absent="R.nn.attention", wrong="no relax.nn.attention in the module"),
        workaround="The operator is kept whole, and a converter maps it to relax.nn.attention, with masks as a bias.",
        converters={"scaled_dot_product_attention.default": _convert_attention},
    ),
    Defect(
        name="group_norm_without_weight",
        title="group_norm without weight and bias is rejected",
        location="ExportedProgramImporter._native_group_norm",
        description="The missing weight is handed on as None, a null pointer in the module.",
        function=lambda x: torch.nn.functional.group_norm(x, 2),
        args=(torch.arange(16.0).reshape(1, 4, 2, 2),),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "null pointer"),
        workaround="A converter that fills in ones and zeros.",
        converters={"native_group_norm.default": _convert_group_norm},
    ),
    Defect(
        name="max_pool_without_stride",
        title="max_pool2d and max_pool3d with padding and without a stride are rejected",
        location="BaseFXGraphImporter._max_pool2d_impl",
        description=(
            "torch.export writes an omitted stride as an empty list, which stands for the size of the kernel. The "
            "converters know that of None alone, and hand the list on as a stride of no dimensions."
        ),
        function=lambda x: torch.nn.functional.max_pool2d(x, 2, padding=1),
        args=normal((1, 2, 4, 4)),
        raw=RawOutcome(Symptom.REJECTED, "InternalError", "strides"),
        workaround="The size of the kernel is written as the stride.",
        passes=(_fill_strides,),
    ),
    Defect(
        name="matmul_float32",
        title="A matrix product of float64 or of integers becomes float32",
        location="ExportedProgramImporter.create_convert_map",
        description=(
            "mm, bmm and matmul are imported with out_dtype=float32 whatever the operands are: half of the digits of a "
            "float64 product are lost, and the dtype of the result is not PyTorch's."
        ),
        function=lambda x, y: x @ y,
        args=(_double(2, 3), _double(3, 2)),
        raw=RawOutcome(Symptom.WRONG_RESULT, wrong="a float32 result"),
        workaround="Converters that ask for the result's dtype.",
        converters=dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), _convert_matmul),
    ),
    Defect(
        name="addmm_float64",
        title="addmm of float64 is rejected",
        location="BaseFXGraphImporter._addmm",
        description="The product is float32, as in matmul_float32, and does not add to a float64 bias.",
        function=lambda bias, x, y: torch.addmm(bias, x, y),
        args=(_double(2), _double(2, 3), _double(3, 2)),
        raw=RawOutcome(Symptom.REJECTED, "TypeError", "float64"),
        workaround="A converter that asks for the result's dtype.",
        converters={"addmm.default": _convert_addmm},
    ),
)

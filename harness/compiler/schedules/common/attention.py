"""What an attention on Relax computes: the question that every target's kernels begin with."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, sym

from harness.compiler.schedules.common.graph import extents


@dataclass(frozen=True)
class Attention:
    """What is computed, whatever the operands are.

    Attributes:
        batch, queries, heads: Extents.
        keys: Extent, or an expression where it is symbolic.
        channels: Of a query and of a key.
        width: Channels of a value.
        dtype: Of operands and result, a floating-point type.
        scale: Factor of the scores.
        diagonal: Query i sees keys up to i + diagonal, an expression where keys are; None if it sees all.
        bias: Shape that broadcasts to [batch, head, query, key]; None if there is none.
        bias_dtype: A floating-point type, which is added, or bool, where false masks a key out.
    """

    batch: int
    queries: int
    keys: Any
    heads: int
    channels: int
    width: int
    dtype: str = "float32"
    scale: float = 1.0
    diagonal: Any = None
    bias: tuple[Any, ...] | None = None
    bias_dtype: str = "float32"


def recognized(
    node: ir.Call, dtypes: Collection[str], bias: relax.Expr | None, *, symbolic_keys: bool = False
) -> Attention | None:
    """A call of `relax.nn.attention` or `relax.nn.attention_bias` as a problem.

    Args:
        node: The call.
        dtypes: Those that the kernels take; operands are all of the same one, a bias is of any of them or bool.
        bias: The bias as the kernel reads it, if there is one.
        symbolic_keys: Whether the kernels take a number of keys that is not known when they are compiled.

    Returns:
        None where another shape is not static, or empty, where there is a window, or for other types.
    """
    operands, attributes = node.args[:3], node.attrs
    shapes = [extents(operand) for operand in operands]
    found = {str(operand.ty.dtype) for operand in operands}
    if any(shape is None or len(shape) != 4 or 0 in shape for shape in shapes) or len(found) != 1:
        return None
    (dtype,) = found
    bias_shape = None if bias is None else extents(bias)
    bias_dtype = "float32" if bias is None else str(bias.ty.dtype)
    if dtype not in dtypes or attributes.window_size is not None or (bias is not None and bias_shape is None):
        return None
    if bias_dtype not in (*dtypes, "bool"):
        return None
    (batch, queries, heads, channels), (_, keys, _, _), (_, _, _, width) = (shape or () for shape in shapes)
    others = {extent for shape in (*shapes, bias_shape) for extent in shape or () if not isinstance(extent, int)}
    if others and not (symbolic_keys and all(_same(extent, keys) for extent in others)):
        return None
    if not all(isinstance(extent, int) for extent in (batch, queries, heads, channels, width)):
        return None
    scale = 1.0 / math.sqrt(channels) if attributes.scale is None else float(attributes.scale)
    offset = {None: None, "TopLeft": 0, "BottomRight": keys - queries}
    diagonal = offset[None if attributes.causal_mask is None else str(attributes.causal_mask)]
    return Attention(batch, queries, keys, heads, channels, width, dtype, scale, diagonal, bias_shape, bias_dtype)


def _same(extent: Any, keys: Any) -> bool:
    return bool(sym.Analyzer().can_prove_equal(extent, keys))

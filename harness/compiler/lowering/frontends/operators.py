"""Makes the Relax expressions of attention and of indices, for the converters of both frontends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from tvm import relax


def attention(
    operands: Sequence[relax.Expr], bias: relax.Expr | None, scale: float | None, is_causal: bool
) -> relax.Expr:
    """Returns the attention of query, key and value; operands and result are [batch, heads, length, width]."""
    result = relax.op.nn.attention(
        *(relax.op.permute_dims(operand, [0, 2, 1, 3]) for operand in operands),
        bias=bias,
        scale=None if scale is None else float(scale),
        causal_mask="TopLeft" if is_causal else None,
    )
    return relax.op.permute_dims(result, [0, 2, 1, 3])


def additive_mask(mask: relax.Expr) -> relax.Expr:
    """Returns a mask as numbers that are added to scores: False becomes -inf, True 0."""
    if str(mask.ty.dtype) != "bool":
        return mask
    return relax.op.where(mask, relax.const(0.0, "float32"), relax.const(-math.inf, "float32"))


def attention_bias(mask: relax.Expr, shape: Sequence[int], queries: int, keys: int) -> relax.Expr:
    """Returns a mask of up to four dimensions as an additive bias, [batch or 1, heads or 1, queries, keys]."""
    shape = [*[1] * (4 - len(shape)), *shape]
    return relax.op.broadcast_to(relax.op.reshape(additive_mask(mask), shape), [*shape[:2], queries, keys])


def nonnegative(indices: relax.Expr, extents: Sequence[int]) -> relax.Expr:
    """Returns the indices [..., axes] with negative indices converted to indices from the front of their axis.

    Args:
        indices: The indices; without a last dimension if there is one axis.
        extents: The extent of each axis.
    """
    dtype = str(indices.ty.dtype)
    ends = relax.const(np.asarray(extents, dtype), dtype) if len(extents) > 1 else relax.const(extents[0], dtype)
    negative = relax.op.less(indices, relax.const(0, dtype))
    return relax.op.where(negative, relax.op.add(indices, ends), indices)

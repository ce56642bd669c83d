"""Recognizes attention on Relax as a problem, where every target's kernels begin."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import extents, same
from harness.compiler.schedules.common.kernel_info import KernelInfo, kernel


@dataclass(frozen=True)
class Attention:
    """The problem of an attention, whatever its operands are.

    Attributes:
        batch, queries, heads: Extents.
        keys: Extent, or an expression where it is symbolic.
        channels: Channels of a query and of a key.
        width: Channels of a value.
        dtype: Floating-point type of operands and result.
        scale: Factor of the scores.
        diagonal: Query i sees keys up to i + diagonal, an expression where keys are; None if it sees all.
        bias: Shape that broadcasts to [batch, head, query, key]; None if there is none.
        bias_dtype: A floating-point type, which is added, or bool, where false masks a key out.
    """

    batch: int
    queries: int
    keys: T.Index
    heads: int
    channels: int
    width: int
    dtype: str = "float32"
    scale: float = 1.0
    diagonal: T.Index | None = None
    bias: tuple[Any, ...] | None = None
    bias_dtype: str = "float32"

    @property
    def static_keys(self) -> int:
        """Returns the number of keys; 0 where it is symbolic."""
        return self.keys if isinstance(self.keys, int) else 0

    def info(self, algorithm: str, reads: Sequence[bool]) -> KernelInfo:
        """Returns the facts of a kernel.

        Args:
            algorithm: The name of its algorithm.
            reads: Whether queries, keys and values are computed while they are read.
        """
        sizes = {name: getattr(self, name) for name in ("batch", "heads", "queries", "keys", "channels", "width")}
        flop = 2 * self.batch * self.heads * self.queries * self.static_keys * (self.channels + self.width)
        return replace(
            kernel("nn.attention", algorithm, **{name: _word(extent) for name, extent in sizes.items()}),
            reads=tuple(name for name, computed in zip(("queries", "keys", "values"), reads, strict=True) if computed),
            flop=flop or None,
        )


def recognized(
    node: ir.Call, dtypes: Collection[str], bias: relax.Expr | None, *, symbolic_keys: bool = False
) -> Attention | None:
    """Returns a call of `relax.nn.attention` or `relax.nn.attention_bias` as a problem.

    Args:
        node: The call.
        dtypes: The types that the kernels take; all operands have the same type, a bias has any of them or bool.
        bias: The bias as the kernel reads it, if there is one.
        symbolic_keys: Whether the kernels take a symbolic number of keys.

    Returns:
        The problem; None if another shape is symbolic or empty, there is a window, or a type is not taken.
    """
    operands, attributes = node.args[:3], node.attrs
    shapes = [extents(operand) for operand in operands]
    operand_dtypes = {str(operand.ty.dtype) for operand in operands}
    if any(shape is None or len(shape) != 4 or 0 in shape for shape in shapes) or len(operand_dtypes) != 1:
        return None
    (dtype,) = operand_dtypes
    bias_shape = None if bias is None else extents(bias)
    bias_dtype = "float32" if bias is None else str(bias.ty.dtype)
    if dtype not in dtypes or attributes.window_size is not None or (bias is not None and bias_shape is None):
        return None
    if bias_dtype not in (*dtypes, "bool"):
        return None
    (batch, queries, heads, channels), (_, keys, _, _), (_, _, _, width) = (shape or () for shape in shapes)
    symbolic_extents = {
        extent for shape in (*shapes, bias_shape) for extent in shape or () if not isinstance(extent, int)
    }
    if symbolic_extents and not (symbolic_keys and all(same([extent], [keys]) for extent in symbolic_extents)):
        return None
    if not all(isinstance(extent, int) for extent in (batch, queries, heads, channels, width)):
        return None
    scale = 1.0 / math.sqrt(channels) if attributes.scale is None else float(attributes.scale)
    offset = {None: None, "TopLeft": 0, "BottomRight": keys - queries}
    diagonal = offset[None if attributes.causal_mask is None else str(attributes.causal_mask)]
    return Attention(batch, queries, keys, heads, channels, width, dtype, scale, diagonal, bias_shape, bias_dtype)


def _word(extent: object) -> int | str:
    """Returns an extent, an expression as a word."""
    return extent if isinstance(extent, int) else re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(extent))

"""Recognizes layer and group normalization as a normalization of lines, where every target's kernels begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import static_shape


@dataclass(frozen=True)
class Normalization:
    """A normalization of contiguous lines: data [lines, channels, inner], each line over channels and inner.

    Attributes:
        data: The tensor to normalize.
        shape: Its shape on Relax.
        lines, channels, inner: Its shape as a normalization of lines.
        groups: Line i has the factors and offsets of group i modulo `groups`.
        scale, shift: Factors and offsets, viewed as [groups, channels]; None if there are none.
        epsilon: The number added to the variance.
    """

    data: relax.Expr
    shape: tuple[int, ...]
    lines: int
    channels: int
    inner: int
    groups: int
    scale: relax.Expr | None
    shift: relax.Expr | None
    epsilon: float

    @property
    def affine(self) -> dict[str, relax.Expr]:
        """Returns scale and shift by name, as far as there are any, in this order."""
        return {name: value for name, value in (("scale", self.scale), ("shift", self.shift)) if value is not None}

    def finished(
        self,
        value: T.Expr,
        affine: Sequence[T.Buffer],
        index: tuple[T.Index, ...],
        widened: Callable[[T.Expr], T.Expr] = lambda factor: factor,
    ) -> T.Expr:
        """Returns value · scale + shift, of which tensors for `affine` have the numbers at the index."""
        remaining = iter(affine)
        if self.scale is not None:
            value = value * widened(next(remaining)[index])
        return value if self.shift is None else value + widened(next(remaining)[index])


def recognized(node: relax.Call, dtypes: Collection[str]) -> Normalization | None:
    """Recognizes a `relax.nn.layer_norm` or `relax.nn.group_norm` as a normalization of lines.

    Args:
        node: The call.
        dtypes: The types that the kernels take; all operands have the same type.

    Returns:
        The normalization; None if lines are not contiguous, or a shape is symbolic, empty, or of another dtype.
    """
    data, scale, shift = node.args[0], *_affine(node)
    dtype = str(data.ty.dtype)
    shape = static_shape(data, dtype)
    affine_static = all(value is None or static_shape(value, dtype) is not None for value in (scale, shift))
    if dtype not in dtypes or not shape or not math.prod(shape) or not affine_static:
        return None
    rank = len(shape)
    axes = sorted(int(axis) % rank for axis in node.attrs.axes)
    if axes != list(range(rank - len(axes), rank)):
        return None
    epsilon = float(node.attrs.epsilon)
    if node.op.name == "relax.nn.layer_norm":
        count = math.prod(shape[rank - len(axes) :])
        return Normalization(data, shape, math.prod(shape) // count, count, 1, 1, scale, shift, epsilon)
    groups = int(node.attrs.num_groups)
    if int(node.attrs.channel_axis) % rank != 1 or len(axes) != rank - 2 or shape[1] % groups:
        return None
    lines, channels, inner = shape[0] * groups, shape[1] // groups, math.prod(shape[2:])
    return Normalization(data, shape, lines, channels, inner, groups, scale, shift, epsilon)


def _affine(node: relax.Call) -> tuple[relax.Expr | None, relax.Expr | None]:
    """Returns the scale and shift that are applied.

    An importer that finds no weight or bias may leave the argument out or null; TVM's own legalization crashes on it.
    """
    scale, shift = (node.args[n] if n < len(node.args) else None for n in (1, 2))
    return scale if node.attrs.scale else None, shift if node.attrs.center else None

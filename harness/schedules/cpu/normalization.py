"""Layer and group normalization with exact moments.

Mean and variance come from two passes with fp64 sums over a line that is still in the cache
(`reduction.emit_moments`); the output is fp32 arithmetic on the centred value, so that a large common offset of the
inputs costs no digits.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from harness.schedules.cpu import reduction
from harness.schedules.cpu.emit import Argument, for_each_vector, prim_func
from harness.schedules.cpu.lowering import call, static_shape
from harness.schedules.cpu.reduction import (
    LANES,
    Legalize,
    default,
    emit_centre,
    emit_line_moments,
    emit_moments,
    fp64,
    narrow,
    reshaped,
    scalar,
    tasks,
)


def _inverse_root(squares: Any, count: int, epsilon: float) -> Any:
    """Emits 1/√(variance + ε), computed in fp64."""
    return scalar(narrow(fp64(1.0) / tirx.sqrt(squares / fp64(count) + fp64(epsilon))), "float32")


def layer_norm_kernel(rows: int, count: int, epsilon: float, scaled: bool, shifted: bool) -> tirx.PrimFunc:
    """Normalizes each row of [rows, count]; parameters data, scale and shift [count] if there are, out."""

    def body(data: tirx.Buffer, *rest: tirx.Buffer) -> None:
        *affine, out = rest
        with tasks(rows, rows * count) as i:
            mean, squares = emit_moments(count, lambda k: data[i, k])
            centred = emit_centre(mean)
            factor = _inverse_root(squares, count, epsilon)

            def write(k: Any) -> None:
                value = centred(data[i, k]) * factor
                if scaled:
                    value = value * affine[0][k]
                if shifted:
                    value = value + affine[-1][k]
                T.buffer_store(out, value, [i, k])

            for_each_vector(count, LANES, write)

    names = [name for name, present in (("scale", scaled), ("shift", shifted)) if present]
    line = [Argument(name, (count,)) for name in names]
    return prim_func("layer_norm", [Argument("data", (rows, count)), *line, Argument("out", (rows, count))], body)


def group_norm_kernel(
    batch: int, groups: int, channels: int, inner: int, epsilon: float, scaled: bool, shifted: bool
) -> tirx.PrimFunc:
    """Normalizes each group of [batch · groups, channels, inner], `channels` being those of one group.

    The parameters are data, scale [groups, channels] if `scaled`, shift likewise, out. A group is one contiguous
    line; with few groups it is cut into chunks so that every thread has work.
    """
    count = channels * inner
    lines = batch * groups

    def body(data: tirx.Buffer, *rest: tirx.Buffer) -> None:
        *affine, out = rest
        moments = emit_line_moments(lines, count, lambda i, k: data[i, k // inner, k % inner])
        statistics = T.alloc_buffer((lines, 3), "float32")
        with T.serial(0, lines) as i:
            mean, squares = moments(i)
            high = scalar(narrow(mean), "float32")
            T.buffer_store(statistics, high, [i, 0])
            T.buffer_store(statistics, narrow(mean - tirx.Cast("float64", high)), [i, 1])
            T.buffer_store(statistics, _inverse_root(squares, count, epsilon), [i, 2])
        with tasks(lines * channels, lines * count) as task:
            i, c = task // channels, task % channels
            high, low, factor = (scalar(statistics[i, n], "float32") for n in range(3))
            scale, shift = (
                (scalar(a[i % groups, c], "float32") for a in (affine[0], affine[-1])) if affine else (None,) * 2
            )

            def write(k: Any) -> None:
                value = ((data[i, c, k] - high) - low) * factor
                if scaled:
                    value = value * scale
                if shifted:
                    value = value + shift
                T.buffer_store(out, value, [i, c, k])

            for_each_vector(inner, LANES, write)

    names = [name for name, present in (("scale", scaled), ("shift", shifted)) if present]
    affine = [Argument(name, (groups, channels)) for name in names]
    shape = (lines, channels, inner)
    return prim_func("group_norm", [Argument("data", shape), *affine, Argument("out", shape)], body)


def _affine(node: relax.Call) -> tuple[list[relax.Expr], bool, bool]:
    """The scale and shift that a normalization really applies, and which of the two there are.

    An importer that finds no weight or bias may leave the argument out or null; TVM's own legalization crashes on it.
    """
    given = [node.args[n] if n < len(node.args) else None for n in (1, 2)]
    scaled, shifted = given[0] is not None and bool(node.attrs.scale), given[1] is not None and bool(node.attrs.center)
    return [value for value, used in zip(given, (scaled, shifted), strict=True) if used], scaled, shifted


def _layer_norm(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    data = node.args[0]
    shape = static_shape(data)
    operands, scaled, shifted = _affine(node)
    if shape is None or math.prod(shape) == 0 or any(static_shape(operand) is None for operand in operands):
        return default(bb, node)
    rank = len(shape)
    axes = sorted(int(axis) % rank for axis in node.attrs.axes)
    if axes != list(range(rank - len(axes), rank)):
        return default(bb, node)
    count = math.prod(shape[rank - len(axes) :])
    rows = math.prod(shape) // count
    function = layer_norm_kernel(rows, count, float(node.attrs.epsilon), scaled, shifted)
    lines = [reshaped(bb, operand, (count,)) for operand in operands]
    arguments = [reshaped(bb, data, (rows, count)), *lines]
    return reshaped(bb, bb.emit(call(bb, f"layer_norm_{rows}x{count}", function, arguments)), shape)


def _group_norm(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    data = node.args[0]
    shape = static_shape(data)
    operands, scaled, shifted = _affine(node)
    if shape is None or math.prod(shape) == 0 or any(static_shape(operand) is None for operand in operands):
        return default(bb, node)
    rank = len(shape)
    groups = int(node.attrs.num_groups)
    axes = sorted(int(axis) % rank for axis in node.attrs.axes)
    if int(node.attrs.channel_axis) % rank != 1 or axes != list(range(2, rank)) or shape[1] % groups:
        return default(bb, node)
    channels, inner = shape[1] // groups, math.prod(shape[2:])
    lines = shape[0] * groups
    function = group_norm_kernel(shape[0], groups, channels, inner, float(node.attrs.epsilon), scaled, shifted)
    affine = [reshaped(bb, operand, (groups, channels)) for operand in operands]
    arguments = [reshaped(bb, data, (lines, channels, inner)), *affine]
    name = f"group_norm_{lines}x{channels}x{inner}"
    return reshaped(bb, bb.emit(call(bb, name, function, arguments)), shape)


LEGALIZE: dict[str, Legalize] = {
    **reduction.LEGALIZE,
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.group_norm": _group_norm,
}
"""Legalizations of fp32 normalizations and reductions, by operator."""

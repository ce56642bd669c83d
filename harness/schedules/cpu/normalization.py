"""Layer and group normalization with exact moments.

Mean and variance come from two passes with fp64 sums over a line that is still in the cache
(`reduction.emit_moments`); the output is fp32 arithmetic on the centred value, so that a large common offset of the
inputs costs no digits.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from harness.schedules.common.graph import Legalize, call, default, reshaped
from harness.schedules.common.kernel import Argument, prim_func
from harness.schedules.common.kernel_info import kernel
from harness.schedules.common.normalization import recognized
from harness.schedules.cpu import reduction
from harness.schedules.cpu.emit import for_each_vector
from harness.schedules.cpu.reduction import (
    LANES,
    emit_centre,
    emit_line_moments,
    emit_moments,
    inverse_root,
    narrow,
    scalar,
    tasks,
)

_DTYPES = ("float32",)


def layer_norm_kernel(rows: int, count: int, epsilon: float, scaled: bool, shifted: bool) -> tirx.PrimFunc:
    """Normalizes each row of [rows, count]; parameters data, scale and shift [count] if there are, out."""

    def body(data: tirx.Buffer, *rest: tirx.Buffer) -> None:
        *affine, out = rest
        with tasks(rows, rows * count) as i:
            mean, squares = emit_moments(count, lambda k: data[i, k])
            centred = emit_centre(mean)
            factor = scalar(inverse_root(squares, count, epsilon), "float32")

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
    arguments = [Argument("data", (rows, count)), *line, Argument("out", (rows, count))]
    return prim_func("layer_norm", arguments, body, kernel("nn.layer_norm", lines=rows, count=count))


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
            T.buffer_store(statistics, inverse_root(squares, count, epsilon), [i, 2])
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
    info = kernel("nn.group_norm", lines=lines, channels=channels, inner=inner)
    return prim_func("group_norm", [Argument("data", shape), *affine, Argument("out", shape)], body, info)


def _layer_norm(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    found = recognized(node, _DTYPES)
    if found is None:
        return default(bb, node)
    rows, count = found.lines, found.channels
    scaled, shifted = found.scale is not None, found.shift is not None
    function = layer_norm_kernel(rows, count, found.epsilon, scaled, shifted)
    lines = [reshaped(bb, operand, (count,)) for operand in found.affine]
    arguments = [reshaped(bb, found.data, (rows, count)), *lines]
    return reshaped(bb, bb.emit(call(bb, f"layer_norm_{rows}x{count}", function, arguments)), found.shape)


def _group_norm(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    found = recognized(node, _DTYPES)
    if found is None:
        return default(bb, node)
    lines, groups, channels, inner = found.lines, found.groups, found.channels, found.inner
    scaled, shifted = found.scale is not None, found.shift is not None
    function = group_norm_kernel(lines // groups, groups, channels, inner, found.epsilon, scaled, shifted)
    affine = [reshaped(bb, operand, (groups, channels)) for operand in found.affine]
    arguments = [reshaped(bb, found.data, (lines, channels, inner)), *affine]
    name = f"group_norm_{lines}x{channels}x{inner}"
    return reshaped(bb, bb.emit(call(bb, name, function, arguments)), found.shape)


LEGALIZE: dict[str, Legalize] = {
    **reduction.LEGALIZE,
    "relax.nn.layer_norm": _layer_norm,
    "relax.nn.group_norm": _group_norm,
}
"""Legalizations of fp32 normalizations and reductions, by operator."""

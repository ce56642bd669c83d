"""Builds softmax and log-softmax: one task per row, three passes over a row that stays in the cache, fp64 sums."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, call, default, reshaped, static_shape
from harness.compiler.schedules.common.kernel import Argument, fp32, prim_func, registers
from harness.compiler.schedules.common.kernel_info import KernelInfo, kernel
from harness.compiler.schedules.cpu import math as elementary
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.reduction import (
    LANES,
    Fold,
    each_block,
    fold_line,
    fp64,
    scalar,
    tasks,
    to_f32,
    to_f64,
)


def _greater(a: T.Expr, b: T.Expr) -> T.Expr:
    return T.Select(a > b, a, b)


def _info(log: bool, lines: int, count: int) -> KernelInfo:
    return kernel("nn.log_softmax" if log else "nn.softmax", lines=lines, count=count)


def row_kernel(rows: int, count: int, log: bool) -> T.PrimFunc:
    """Builds softmax over each row of [rows, count].

    -inf gives 0; a row of nothing but -inf, or with +inf or NaN in it, gives NaN, as in PyTorch.
    """

    def body(data: T.Buffer, out: T.Buffer) -> None:
        with tasks(rows, rows * count) as i:
            (largest,) = fold_line(count, [Fold("float32", -math.inf, lambda m, k: _greater(data[i, k], m), _greater)])
            top = scalar(largest, "float32")
            # The exponentials go through memory: the next pass and the sum both read them.
            for_each_vector(count, LANES, lambda k: T.buffer_store(out, elementary.exp(data[i, k] - top), [i, k]))
            (total,) = fold_line(count, [Fold("float64", 0.0, lambda s, k: s + to_f64(out[i, k]), lambda a, b: a + b)])
            if log:
                normalizer = scalar(to_f32(T.log(total)), "float32")
                for_each_vector(count, LANES, lambda k: T.buffer_store(out, (data[i, k] - top) - normalizer, [i, k]))
            else:
                normalizer = scalar(to_f32(total), "float32")
                for_each_vector(count, LANES, lambda k: T.buffer_store(out, out[i, k] / normalizer, [i, k]))

    shape = (rows, count)
    return prim_func("softmax", [Argument("data", shape), Argument("out", shape)], body, _info(log, rows, count))


def column_kernel(outer: int, count: int, inner: int, log: bool) -> T.PrimFunc:
    """Builds softmax over the middle of [outer, count, inner], a block of neighbouring columns at a time."""

    def body(data: T.Buffer, out: T.Buffer) -> None:
        def block(i: T.Index, first: T.Index, width: int) -> None:
            def for_each(step: Callable[[T.Index], None]) -> None:
                for_each_vector(width, LANES, step)

            top = registers((width,))
            total = registers((width,), "float64")
            scale = registers((width,))
            for_each(lambda j: T.buffer_store(top, fp32(-math.inf), [j]))
            with T.serial(0, count) as k:
                for_each(lambda j: T.buffer_store(top, _greater(data[i, k, first + j], top[j]), [j]))
            for_each(lambda j: T.buffer_store(total, fp64(0.0), [j]))
            with T.serial(0, count) as k:

                def store(j: T.Index) -> None:
                    T.buffer_store(out, elementary.exp(data[i, k, first + j] - top[j]), [i, k, first + j])

                for_each(store)
                for_each(lambda j: T.buffer_store(total, total[j] + to_f64(out[i, k, first + j]), [j]))
            for_each(lambda j: T.buffer_store(scale, to_f32(T.log(total[j]) if log else total[j]), [j]))
            with T.serial(0, count) as k:

                def finish(j: T.Index) -> None:
                    index = [i, k, first + j]
                    value = (data[tuple(index)] - top[j]) - scale[j] if log else out[tuple(index)] / scale[j]
                    T.buffer_store(out, value, index)

                for_each(finish)

        each_block(outer, count, inner, block)

    shape = (outer, count, inner)
    info = _info(log, outer * inner, count)
    return prim_func("softmax", [Argument("data", shape), Argument("out", shape)], body, info)


def _legalize(log: bool) -> Legalize:
    def legalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
        data = node.args[0]
        shape = static_shape(data)
        if not shape or math.prod(shape) == 0:
            return default(bb, node)
        axis = int(node.attrs.axis) % len(shape)
        outer, count, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
        view = (outer, count) if inner == 1 else (outer, count, inner)
        function = row_kernel(outer, count, log) if inner == 1 else column_kernel(outer, count, inner, log)
        name = f"{'log_' if log else ''}softmax_{'x'.join(map(str, view))}"
        return reshaped(bb, bb.emit(call(bb, name, function, [reshaped(bb, data, view)])), shape)

    return legalize


LEGALIZE: dict[str, Legalize] = {
    "relax.nn.softmax": _legalize(log=False),
    "relax.nn.log_softmax": _legalize(log=True),
}
"""Legalizations of fp32 softmax, by operator."""

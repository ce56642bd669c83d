"""Builds softmax and log-softmax: one task per row, three passes over a row that stays in the cache, fp64 sums."""

from __future__ import annotations

import math

from tvm import relax, topi

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, call_on_views, default, static_shape
from harness.compiler.schedules.common.kernel import Argument, prim_func
from harness.compiler.schedules.common.kernel_info import kernel
from harness.compiler.schedules.cpu import math as elementary
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.reduction import (
    LANES,
    Fold,
    add,
    fold_line,
    scalar,
    tasks,
    to_f32,
    to_f64,
)


def _greater(a: T.Expr, b: T.Expr) -> T.Expr:
    return T.Select(a > b, a, b)


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
            (total,) = fold_line(count, [add(lambda k: to_f64(out[i, k]))])
            if log:
                normalizer = scalar(to_f32(T.log(total)), "float32")
                for_each_vector(count, LANES, lambda k: T.buffer_store(out, (data[i, k] - top) - normalizer, [i, k]))
            else:
                normalizer = scalar(to_f32(total), "float32")
                for_each_vector(count, LANES, lambda k: T.buffer_store(out, out[i, k] / normalizer, [i, k]))

    shape = (rows, count)
    info = kernel("nn.log_softmax" if log else "nn.softmax", lines=rows, count=count)
    return prim_func("softmax", [Argument("data", shape), Argument("out", shape)], body, info)


def _legalize(log: bool) -> Legalize:
    def legalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
        data = node.args[0]
        shape = static_shape(data)
        if not shape or math.prod(shape) == 0:
            return default(bb, node)
        # Lines are runs of memory: another axis is moved to the end and back.
        axis, last = int(node.attrs.axis) % len(shape), len(shape) - 1
        swapped = [{axis: last, last: axis}.get(d, d) for d in range(len(shape))]
        rows = data if axis == last else bb.emit(bb.call_te(topi.transpose, data, swapped))
        outer, count = math.prod(shape) // shape[axis], shape[axis]
        name = f"{'log_' if log else ''}softmax_{outer}x{count}"
        result = call_on_views(bb, name, row_kernel(outer, count, log), [rows], [shape[d] for d in swapped])
        return result if axis == last else bb.call_te(topi.transpose, result, swapped)

    return legalize


LEGALIZE: dict[str, Legalize] = {
    "relax.nn.softmax": _legalize(log=False),
    "relax.nn.log_softmax": _legalize(log=True),
}
"""Legalizations of fp32 softmax, by operator."""

"""Builds softmax, and sums and means over long axes: partial results per thread and a tree over threads, in fp32."""

from __future__ import annotations

import math

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, around, call_on_views, default, static_shape
from harness.compiler.schedules.common.kernel import Argument, ceil_div, prim_func, where
from harness.compiler.schedules.common.kernel_info import kernel
from harness.compiler.schedules.gpu.lines import CHUNK, LONGEST, Fold, Line, added, each_chunk, each_line
from harness.compiler.schedules.gpu.threads import FLOATS, converted, fp32, scalar

_SHORTEST = 64
"""Terms of a sum below which a serial sum, fused with its neighbours, is good enough."""


def softmax_kernel(outer: int, count: int, inner: int, log: bool, dtype: str) -> T.PrimFunc:
    """Builds softmax over the middle of [outer, count, inner].

    -inf gives 0; a line of -inf alone, or with +inf or NaN in it, gives NaN, as in PyTorch.
    """

    def body(data: T.Buffer, out: T.Buffer) -> None:
        with each_line(outer * inner, count) as (index, exists, threads, thread):
            i, j = (index, 0) if inner == 1 else (T.Bind(index // inner), T.Bind(index % inner))
            line = Line(count, threads, thread, lambda k: fp32(data[i, k, j]))
            (largest,) = line.fold([Fold(-math.inf, lambda top, value, k: T.max(top, value), T.max)])
            top = scalar(largest)
            line.replace(lambda value: value - top if log else T.exp(value - top))
            (total,) = line.fold([added(lambda value, k: T.exp(value) if log else value)])
            normalizer = scalar(T.log(total) if log else total)

            def write(value: T.Expr, k: T.Index) -> None:
                result = value - normalizer if log else value / normalizer
                with where(*exists):
                    T.buffer_store(out, converted(result, dtype), [i, k, j])

            line.for_each(write)

    shape = (outer, count, inner)
    info = kernel("nn.log_softmax" if log else "nn.softmax", lines=outer * inner, count=count)
    return prim_func("softmax", [Argument("data", shape, dtype), Argument("out", shape, dtype)], body, info)


def sum_kernel(outer: int, count: int, inner: int, divisor: int, dtypes: tuple[str, str]) -> T.PrimFunc:
    """Builds the divided sum over the middle of [outer, count, inner], from the first dtype to the second."""

    def body(data: T.Buffer, out: T.Buffer) -> None:
        with each_line(outer * inner, count) as (index, exists, threads, thread):
            i, j = (index, 0) if inner == 1 else (T.Bind(index // inner), T.Bind(index % inner))
            line = Line(count, threads, thread, lambda k: fp32(data[i, k, j]))
            (total,) = line.fold([added(lambda value, k: value)])
            result = scalar(total if divisor == 1 else total / fp32(divisor))
            with T.If(T.EQ(thread % threads, 0)), T.Then(), where(*exists):
                T.buffer_store(out, converted(result, dtypes[1]), [i, j])

    arguments = [Argument("data", (outer, count, inner), dtypes[0]), Argument("out", (outer, inner), dtypes[1])]
    info = kernel("sum" if divisor == 1 else "mean", lines=outer * inner, count=count)
    return prim_func("sum", arguments, body, info)


def chunk_sums_kernel(lines: int, count: int, dtype: str) -> T.PrimFunc:
    """Builds the sum of each chunk of each line: data [lines, count], out [lines, chunks]."""
    chunks = ceil_div(count, CHUNK)

    def body(data: T.Buffer, out: T.Buffer) -> None:
        with each_chunk(lines, count, lambda i, k: fp32(data[i, k])) as (i, c, line, _, thread):
            (total,) = line.fold([added(lambda value, k: value)])
            with T.If(T.EQ(thread, 0)), T.Then():
                T.buffer_store(out, total, [i, c])

    arguments = [Argument("data", (lines, count), dtype), Argument("out", (lines, chunks))]
    return prim_func("chunk_sums", arguments, body, kernel("sum", "of chunks", lines=lines, count=count))


def _softmax(log: bool) -> Legalize:
    def legalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
        data = node.args[0]
        shape, dtype = static_shape(data, None), str(data.ty.dtype)
        if not shape or math.prod(shape) == 0 or dtype not in FLOATS:
            return default(bb, node)
        view = around(shape, int(node.attrs.axis))
        name = f"{'log_' if log else ''}softmax_{'x'.join(map(str, view))}"
        return call_on_views(bb, name, softmax_kernel(*view, log, dtype), [data], shape)

    return legalize


def _sum(mean: bool) -> Legalize:
    def legalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
        data = node.args[0]
        shape, dtypes = static_shape(data, None), (str(data.ty.dtype), str(node.ty.dtype))
        if not shape or math.prod(shape) == 0 or not set(dtypes) <= set(FLOATS):
            return default(bb, node)
        rank = len(shape)
        axes = range(rank) if node.attrs.axis is None else sorted(int(axis) % rank for axis in node.attrs.axis)
        first, last = min(axes), max(axes) + 1
        outer, count, inner = math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:])
        if len(axes) != last - first or count < _SHORTEST:
            return default(bb, node)
        divisor, name = (count, "mean") if mean else (1, "sum")
        operand, label = data, f"{outer}x{count}x{inner}"
        if count > LONGEST and inner == 1:
            of_chunks, chunks = chunk_sums_kernel(outer, count, dtypes[0]), ceil_div(count, CHUNK)
            operand = call_on_views(bb, f"chunk_sums_{label}", of_chunks, [data], (outer, chunks))
            count, dtypes = chunks, ("float32", dtypes[1])
        function = sum_kernel(outer, count, inner, divisor, dtypes)
        return call_on_views(bb, f"{name}_{label}", function, [operand], [int(extent) for extent in node.ty.shape])

    return legalize


LEGALIZE: dict[str, Legalize] = {
    "relax.nn.softmax": _softmax(log=False),
    "relax.nn.log_softmax": _softmax(log=True),
    "relax.sum": _sum(mean=False),
    "relax.mean": _sum(mean=True),
}
"""Legalizations of reductions, by operator."""

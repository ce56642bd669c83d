"""Normalizes layers and groups with accurate moments, in fp32.

The mean is computed in two passes: its rounded value, and the remainder as the mean of the deviations from it. So a
large common offset of the inputs costs no digits. A long line is cut into chunks, each reduced by a block; their
moments are merged (Chan, Golub and LeVeque, 1979), and the elementwise rest is left to TVM, which fuses it with what
follows.
"""

from __future__ import annotations

from typing import Any

from tvm import relax, te

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, call_on_views, default, reshaped
from harness.compiler.schedules.common.kernel import Argument, ceil_div, prim_func, where
from harness.compiler.schedules.common.kernel_info import kernel
from harness.compiler.schedules.common.normalization import Normalization, recognized
from harness.compiler.schedules.gpu.lines import CHUNK, LONGEST, Line, added, each_chunk, each_line
from harness.compiler.schedules.gpu.threads import FLOATS, converted, fp32, scalar


def normalize_kernel(problem: Normalization, dtype: str) -> T.PrimFunc:
    """Builds the normalization of each line of [lines, channels, inner] over channels and inner.

    The parameters are data, scale and shift [groups, channels] if there are, out; line i is of group i modulo `groups`.
    """
    extents = lines, channels, inner = problem.lines, problem.channels, problem.inner
    count, groups = channels * inner, problem.groups

    def body(data: T.Buffer, *rest: T.Buffer) -> None:
        *affine, out = rest
        with each_line(lines, count) as (i, exists, threads, thread):
            line = Line(count, threads, thread, lambda k: fp32(data[i, k // inner, k % inner]))
            _, left, squares = _centre(line, count)
            factor = scalar(_inverse_root(squares, count, problem.epsilon))

            def write(deviation: T.Expr, k: T.Index) -> None:
                value = problem.finished((deviation - left) * factor, affine, (i % groups, k // inner), fp32)
                with where(*exists):
                    T.buffer_store(out, converted(value, dtype), [i, k // inner, k % inner])

            line.for_each(write)

    parameters = [Argument(name, (groups, channels), dtype) for name in problem.affine]
    arguments = [Argument("data", extents, dtype), *parameters, Argument("out", extents, dtype)]
    return prim_func("normalize", arguments, body, kernel("normalize", lines=lines, count=count))


def _centre(line: Line, count: T.Index) -> tuple[T.Expr, T.Expr, T.Expr]:
    """Replaces elements by deviations from the rounded mean.

    Returns:
        The rounded mean; the remainder of the mean; the sum of squared deviations from the sum of both.
    """
    length = fp32(count)
    (total,) = line.fold([added(lambda value, k: value)])
    mean = scalar(total / length)
    line.replace(lambda value: value - mean)
    first, second = line.fold([added(lambda value, k: value), added(lambda value, k: value * value)])
    left = scalar(first / length)
    return mean, left, scalar(second - first * left)


def _inverse_root(squares: T.Expr, count: int, epsilon: float) -> T.Expr:
    """Computes 1/√(variance + ε)."""
    variance = T.max(squares / fp32(count), fp32(0.0))
    return fp32(1.0) / T.sqrt(variance + fp32(epsilon))


def chunk_moments_kernel(lines: int, count: int, dtype: str) -> T.PrimFunc:
    """Builds mean and sum of squared deviations for chunks of lines: data [lines, count], out [lines, chunks, 2]."""
    chunks = ceil_div(count, CHUNK)

    def body(data: T.Buffer, out: T.Buffer) -> None:
        with each_chunk(lines, count, lambda i, k: fp32(data[i, k])) as (i, c, line, length, thread):
            mean, left, squares = _centre(line, length)
            with T.If(T.EQ(thread, 0)), T.Then():
                T.buffer_store(out, mean + left, [i, c, 0])
                T.buffer_store(out, squares, [i, c, 1])

    arguments = [Argument("data", (lines, count), dtype), Argument("out", (lines, chunks, 2))]
    return prim_func("chunk_moments", arguments, body, kernel("moments", "of chunks", lines=lines, count=count))


def merged_moments_kernel(lines: int, count: int, epsilon: float) -> T.PrimFunc:
    """Builds the moments of lines from those of their chunks: moments [lines, chunks, 2], out [lines, 3].

    For each line, out has the mean in two parts, the second far smaller, and 1/√(variance + ε).
    """
    chunks = ceil_div(count, CHUNK)

    def body(moments: T.Buffer, out: T.Buffer) -> None:
        with each_line(lines, chunks) as (i, exists, threads, thread):

            def length(c: T.Index) -> T.Expr:
                return fp32(CHUNK) if count % CHUNK == 0 else fp32(T.min(CHUNK, count - c * CHUNK))

            line = Line(chunks, threads, thread, lambda c: moments[i, c, 0])
            (total,) = line.fold([added(lambda mean, c: length(c) * mean)])
            mean = scalar(total / fp32(count))
            first, between, within = line.fold(
                [
                    added(lambda value, c: length(c) * (value - mean)),
                    added(lambda value, c: length(c) * ((value - mean) * (value - mean))),
                    added(lambda value, c: moments[i, c, 1]),
                ]
            )
            left = scalar(first / fp32(count))
            squares = scalar(within + (between - first * left))
            with T.If(T.EQ(thread % threads, 0)), T.Then():
                for n, value in enumerate((mean, left, _inverse_root(squares, count, epsilon))):
                    with where(*exists):
                        T.buffer_store(out, value, [i, n])

    arguments = [Argument("moments", (lines, chunks, 2)), Argument("out", (lines, 3))]
    return prim_func("merged_moments", arguments, body, kernel("moments", "merged", lines=lines, count=count))


def _normalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    problem = recognized(node, FLOATS)
    if problem is None:
        return default(bb, node)
    data, shape, groups, values = problem.data, problem.shape, problem.groups, list(problem.affine.values())
    lines, channels, inner = problem.lines, problem.channels, problem.inner
    count, dtype = channels * inner, str(data.ty.dtype)
    label = f"{lines}x{channels}x{inner}"
    if count <= LONGEST:
        function = normalize_kernel(problem, dtype)
        return call_on_views(bb, f"normalize_{label}", function, [data, *values], shape)
    of_chunks, merging = chunk_moments_kernel(lines, count, dtype), merged_moments_kernel(lines, count, problem.epsilon)
    moments = call_on_views(bb, f"chunk_moments_{label}", of_chunks, [data], (lines, ceil_div(count, CHUNK), 2))
    merged = call_on_views(bb, f"merged_moments_{label}", merging, [moments], (lines, 3))

    def finish(x: te.Tensor, statistics: te.Tensor, *rest: te.Tensor) -> te.Tensor:
        def wide(value: te.TensorSlice) -> Any:
            return value if dtype == "float32" else value.astype("float32")

        def element(*index: T.Index) -> T.Expr:
            flat: T.Expr = T.const(0, "int32")
            for i, extent in zip(index, shape, strict=True):
                flat = flat * extent + i
            line, channel = flat // count, flat // inner % (groups * channels)
            value: T.Expr = ((wide(x[index]) - statistics[line, 0]) - statistics[line, 1]) * statistics[line, 2]
            return converted(problem.finished(value, rest, (channel,), wide), dtype)

        return te.compute(shape, element, name="normalized")

    flattened = [reshaped(bb, value, (groups * channels,)) for value in values]
    return bb.emit(bb.call_te(finish, data, merged, *flattened, primfunc_name_hint="normalized"))


LEGALIZE: dict[str, Legalize] = {"relax.nn.layer_norm": _normalize, "relax.nn.group_norm": _normalize}
"""Legalizations of normalizations, by operator."""

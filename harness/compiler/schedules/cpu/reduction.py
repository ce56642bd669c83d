"""Reduces over any axes: sums, means, variances, products, maxima and minima, with sums that lose nothing.

TVM's own lowering adds the terms one by one in fp32: after two million terms the third digit is wrong. Here the partial
sums are fp64, a vector of lanes wide; the kernels read memory, so the wider sums cost no time. Maxima and minima pass
NaN on, as PyTorch's do. Every kernel sees its operand as [outer, count, inner] with the middle reduced; axes that are
not neighbours are brought together by a transposition first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from tvm import relax, topi

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import Legalize, around, call_on_views, default, static_shape
from harness.compiler.schedules.common.kernel import Argument, fp32, prim_func, registers, scalar, variable
from harness.compiler.schedules.common.kernel_info import kernel
from harness.compiler.schedules.cpu.emit import for_each_vector

LANES = 32
"""Independent partial results: four registers of fp64 on AVX-512, enough to hide the latency of an addition."""
SERIAL_BELOW = 131072
"""Elements below which starting threads costs more than the work."""
CHUNK = 16384
"""Elements that one task folds when a single row is cut among threads; they stay in the second-level cache."""
_CUT_BELOW = 64
"""Rows are cut into chunks where there are fewer of them than this."""
_NAN_BITS = 0x7F800000
"""|x| as an integer is above it exactly if x is NaN."""


def fp64(value: float) -> T.Expr:
    """Returns an fp64 constant."""
    return T.const(value, "float64")


def to_f64(value: T.Expr) -> T.Expr:
    """Converts fp32 to fp64."""
    return T.Cast("float64", value)


def to_f32(value: T.Expr) -> T.Expr:
    """Rounds fp64 to fp32."""
    return T.Cast("float32", value)


def tasks(count: int, elements: int) -> AbstractContextManager[T.Var]:
    """Emits a loop over `count` tasks that touch `elements` elements together: parallel if that pays."""
    loop: AbstractContextManager[T.Var] = (T.parallel if count > 1 and elements >= SERIAL_BELOW else T.serial)(0, count)
    return loop


def each_block(outer: int, count: int, inner: int, block: Callable[[T.Index, T.Index, int], None]) -> None:
    """Runs `block(i, first column, width)` over [outer, count, inner], LANES columns at a time and then the rest."""
    whole, rest = divmod(inner, LANES)
    if whole:
        with tasks(outer * whole, outer * count * inner) as task:
            block(task // whole, task % whole * LANES, LANES)
    if rest:
        with tasks(outer, outer * count * rest) as i:
            block(i, whole * LANES, rest)


@dataclass(frozen=True)
class Fold:
    """A reduction that runs in several lanes at once.

    Attributes:
        dtype: Element type of the partial results.
        start: Neutral value.
        update: (partial result, index of the term) → partial result.
        merge: Two partial results → one.
    """

    dtype: str
    start: float
    update: Callable[[T.Expr, T.Index], T.Expr]
    merge: Callable[[T.Expr, T.Expr], T.Expr]


def add(term: Callable[[T.Index], T.Expr]) -> Fold:
    """Makes the fold that adds fp64 terms, by index."""
    return Fold("float64", 0.0, lambda partial, k: partial + term(k), lambda a, b: a + b)


def fold_line(count: int, folds: Sequence[Fold]) -> list[T.Expr]:
    """Emits folds over 0 … count and returns their results (scalars in local memory)."""
    whole, rest = divmod(count, LANES)
    results: list[T.Expr] = [T.const(fold.start, fold.dtype) for fold in folds]
    if whole:
        lanes = fold_columns(whole, LANES, lambda j: [_of_every(LANES, j, fold) for fold in folds])
        results = [_merge_lanes(fold, lane) for fold, lane in zip(folds, lanes, strict=True)]
        if not rest:
            return results
    ones = [variable(result) for result in results]
    with T.serial(0, rest) as k:
        for fold, one in zip(folds, ones, strict=True):
            T.buffer_store(one, fold.update(one[0], whole * LANES + k), [0])
    return [one[0] for one in ones]


def _of_every(stride: int, first: T.Index, fold: Fold) -> Fold:
    """Returns the fold of the terms `stride` apart from a first one on."""
    return replace(fold, update=lambda partial, k: fold.update(partial, k * stride + first))


def _merge_lanes(fold: Fold, lane: T.Buffer) -> T.Expr:
    """Emits the merge of all lanes, half with half, and returns the result."""
    width = LANES // 2
    while width > 1:
        with T.vectorized(0, width) as j:
            T.buffer_store(lane, fold.merge(lane[j], lane[j + width]), [j])
        width //= 2
    return scalar(fold.merge(lane[0], lane[1]))


@dataclass(frozen=True)
class Reduction:
    """One reduction of fp32 values.

    Attributes:
        name: For the kernel's name.
        folds: (index of a term → its fp32 value) → the folds that run over it.
        finish: (results of the folds, number of terms) → fp32 result.
    """

    name: str
    folds: Callable[[Callable[[T.Index], T.Expr]], list[Fold]]
    finish: Callable[[Sequence[T.Expr], int], T.Expr]


def _extreme(name: str, start: float, better: Callable[[T.Expr, T.Expr], T.Expr]) -> Reduction:
    def folds(read: Callable[[T.Index], T.Expr]) -> list[Fold]:
        def pick(best: T.Expr, value: T.Expr) -> T.Expr:
            return T.Select(better(value, best), value, best)

        def magnitude(k: T.Index) -> T.Expr:
            return T.bitwise_and(T.reinterpret("int32", read(k)), T.const(0x7FFFFFFF, "int32"))

        return [
            Fold("float32", start, lambda best, k: pick(best, read(k)), pick),
            # Comparisons drop NaN; the largest magnitude as an integer remembers it.
            Fold("int32", 0, lambda seen, k: T.max(seen, magnitude(k)), T.max),
        ]

    def finish(results: Sequence[T.Expr], count: int) -> T.Expr:
        best, seen = results
        return T.Select(seen > T.const(_NAN_BITS, "int32"), fp32(math.nan), best)

    return Reduction(name, folds, finish)


def _sum_folds(read: Callable[[T.Index], T.Expr]) -> list[Fold]:
    return [add(lambda k: to_f64(read(k)))]


SUM = Reduction("sum", _sum_folds, lambda results, count: to_f32(results[0]))
MEAN = Reduction("mean", _sum_folds, lambda results, count: to_f32(results[0] / fp64(count)))
PROD = Reduction(
    "prod",
    lambda read: [Fold("float64", 1.0, lambda partial, k: partial * to_f64(read(k)), lambda a, b: a * b)],
    lambda results, count: to_f32(results[0]),
)
MAX = _extreme("max", -math.inf, lambda a, b: a > b)
MIN = _extreme("min", math.inf, lambda a, b: a < b)


def emit_centre(mean: T.Expr) -> Callable[[T.Index], T.Expr]:
    """Emits the fp64 mean as two fp32 numbers; returns value → value - mean, exact to its last place."""
    high = scalar(to_f32(mean))
    low = scalar(to_f32(mean - to_f64(high)))
    return lambda value: (value - high) - low


def inverse_root(squares: T.Expr, count: int, epsilon: float) -> T.Expr:
    """Returns 1/√(variance + ε) in fp32, computed in fp64 from the sum of squared deviations of so many terms."""
    return to_f32(fp64(1.0) / T.sqrt(squares / fp64(count) + fp64(epsilon)))


def emit_moments(count: int, read: Callable[[T.Index], T.Expr]) -> tuple[T.Expr, T.Expr]:
    """Emits two passes over a line that stays in the cache: its mean and its sum of squared deviations, in fp64."""
    (total,) = fold_line(count, [add(lambda k: to_f64(read(k)))])
    mean = scalar(total / fp64(count))
    centred = emit_centre(mean)

    def square(k: T.Index) -> T.Expr:
        deviation = to_f64(centred(read(k)))
        return deviation * deviation

    (squares,) = fold_line(count, [add(square)])
    return mean, squares


def chunks_of(outer: int, count: int) -> int:
    """Returns into how many equal chunks each of `outer` lines of `count` elements is cut, for threads to share."""
    if outer >= _CUT_BELOW or count < 2 * CHUNK:
        return 1
    return next((n for n in range(count // CHUNK, 1, -1) if count % n == 0 and count // n <= 4 * CHUNK), 1)


def emit_line_moments(
    outer: int, count: int, read: Callable[[T.Index, T.Index], T.Expr]
) -> Callable[[T.Index], tuple[T.Expr, T.Expr]]:
    """Emits the moments of `outer` lines, each cut into chunks if that is needed to keep all threads busy.

    Args:
        outer: Number of lines.
        count: Elements of each.
        read: (line, index) → fp32 element.

    Returns:
        A function from a line to (mean, sum of squared deviations), fp64, which emits the combination of the chunks.
    """
    chunks = chunks_of(outer, count)
    size = count // chunks
    means = T.alloc_buffer((outer, chunks), "float64")
    squares = T.alloc_buffer((outer, chunks), "float64")
    with tasks(outer * chunks, outer * count) as task:
        i, c = task // chunks, task % chunks
        mean, square = emit_moments(size, lambda k: read(i, c * size + k))
        T.buffer_store(means, mean, [i, c])
        T.buffer_store(squares, square, [i, c])

    def combined(i: T.Index) -> tuple[T.Expr, T.Expr]:
        if chunks == 1:
            return means[i, 0], squares[i, 0]
        (total,) = fold_line(chunks, [add(lambda c: means[i, c])])
        mean = scalar(total / fp64(chunks))

        def between(c: T.Index) -> T.Expr:
            deviation = means[i, c] - mean
            return squares[i, c] + fp64(size) * deviation * deviation

        (square,) = fold_line(chunks, [add(between)])
        return mean, square

    return combined


def _merging(fold: Fold, partial: T.Buffer, i: T.Index) -> Fold:
    """Makes the fold that merges the partial results partial[i, :] of another one."""
    return Fold(fold.dtype, fold.start, lambda a, c: fold.merge(a, partial[i, c]), fold.merge)


def line_kernel(reduction: Reduction, outer: int, count: int) -> T.PrimFunc:
    """Builds the reduction of each of `outer` contiguous lines."""

    def body(data: T.Buffer, out: T.Buffer) -> None:
        chunks = chunks_of(outer, count)
        size = count // chunks
        if chunks == 1:
            with tasks(outer, outer * count) as i:
                results = fold_line(count, reduction.folds(lambda k: data[i, k]))
                T.buffer_store(out, reduction.finish(results, count), [i])
            return
        shapes = reduction.folds(lambda k: data[0, k])
        partials = [T.alloc_buffer((outer, chunks), fold.dtype) for fold in shapes]
        with tasks(outer * chunks, outer * count) as task:
            row, c = task // chunks, task % chunks
            results = fold_line(size, reduction.folds(lambda k: data[row, c * size + k]))
            for partial, result in zip(partials, results, strict=True):
                T.buffer_store(partial, result, [row, c])
        with T.serial(0, outer) as row:
            merges = [_merging(fold, partial, row) for fold, partial in zip(shapes, partials, strict=True)]
            T.buffer_store(out, reduction.finish(fold_line(chunks, merges), count), [row])

    info = kernel(reduction.name, lines=outer, count=count)
    return prim_func(reduction.name, [Argument("data", (outer, count)), Argument("out", (outer,))], body, info)


def fold_columns(count: int, width: int, folds: Callable[[T.Index], Sequence[Fold]]) -> list[T.Buffer]:
    """Emits folds over 0 … count for neighbouring columns, and returns their results, [width] each.

    Args:
        count: Number of terms.
        width: Number of columns.
        folds: (column) → its folds.
    """
    shapes = folds(0)
    lanes = [registers((width,), fold.dtype) for fold in shapes]
    for fold, lane in zip(shapes, lanes, strict=True):
        _fill(lane, width, T.const(fold.start, fold.dtype))
    with T.serial(0, count) as k:
        for n, lane in enumerate(lanes):

            def step(j: T.Index, n: int = n, lane: T.Buffer = lane) -> None:
                T.buffer_store(lane, folds(j)[n].update(lane[j], k), [j])

            for_each_vector(width, LANES, step)
    return lanes


def column_kernel(reduction: Reduction, outer: int, count: int, inner: int) -> T.PrimFunc:
    """Builds the reduction of the middle of [outer, count, inner], a block of neighbouring columns at a time."""

    def body(data: T.Buffer, out: T.Buffer) -> None:
        def block(i: T.Index, first: T.Index, width: int) -> None:
            lanes = fold_columns(count, width, lambda j: reduction.folds(lambda k: data[i, k, first + j]))
            for_each_vector(
                width,
                LANES,
                lambda j: T.buffer_store(out, reduction.finish([lane[j] for lane in lanes], count), [i, first + j]),
            )

        each_block(outer, count, inner, block)

    arguments = [Argument("data", (outer, count, inner)), Argument("out", (outer, inner))]
    return prim_func(reduction.name, arguments, body, kernel(reduction.name, lines=outer * inner, count=count))


def _fill(buffer: T.Buffer, width: int, value: T.Expr) -> None:
    for_each_vector(width, LANES, lambda j: T.buffer_store(buffer, value, [j]))


def variance_kernel(outer: int, count: int, _inner: int, root: bool) -> T.PrimFunc:
    """Builds the population variance (or its root) of each of `outer` contiguous lines."""

    def body(data: T.Buffer, out: T.Buffer) -> None:
        moments = emit_line_moments(outer, count, lambda i, k: data[i, k])
        with T.serial(0, outer) as i:
            _, squares = moments(i)
            variance = squares / fp64(count)
            T.buffer_store(out, to_f32(T.sqrt(variance) if root else variance), [i])

    name = "std" if root else "variance"
    info = kernel(name, lines=outer, count=count)
    return prim_func(name, [Argument("data", (outer, count)), Argument("out", (outer,))], body, info)


def _split(shape: tuple[int, ...], axes: Sequence[int]) -> tuple[int, int, int] | None:
    """Returns (outer, count, inner) if the axes are neighbours, not counting those of extent 1, else None."""
    reduced = [a for a in range(len(shape)) if a in axes and shape[a] != 1]
    if not reduced:
        return math.prod(shape), 1, 1
    first, last = reduced[0], reduced[-1] + 1
    if any(a not in axes and shape[a] != 1 for a in range(first, last)):
        return None
    return math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:])


def reduction_kernel(reduction: Reduction, outer: int, count: int, inner: int) -> T.PrimFunc:
    """Builds the reduction of the middle of [outer, count, inner]; operand and result have no `inner` of 1."""
    return line_kernel(reduction, outer, count) if inner == 1 else column_kernel(reduction, outer, count, inner)


def _legalize(name: str, build: Callable[[int, int, int], T.PrimFunc], *, lines_only: bool = False) -> Legalize:
    """Makes a legalization.

    Args:
        name: For the kernel's name.
        build: Builds the kernel that reduces the middle of [outer, count, inner].
        lines_only: Whether it takes an `inner` of 1 alone.
    """

    def legalize(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
        data = node.args[0]
        shape = static_shape(data)
        if shape is None or math.prod(shape) == 0:
            return default(bb, node)
        rank = len(shape)
        axes = list(range(rank)) if node.attrs.axis is None else [int(a) % rank for a in node.attrs.axis]
        extents = _split(shape, axes)
        if extents is None or (lines_only and extents[2] > 1):
            order = [a for a in range(rank) if a not in axes] + sorted(axes)
            data = bb.emit(bb.call_te(topi.transpose, data, order))
            count = math.prod(shape[a] for a in axes)
            extents = math.prod(shape) // count, count, 1
        result_shape = [int(extent) for extent in node.ty.shape]
        return call_on_views(bb, f"{name}_{'x'.join(map(str, extents))}", build(*extents), [data], result_shape)

    return legalize


def cumsum_kernel(outer: int, count: int, inner: int, exclusive: bool) -> T.PrimFunc:
    """Builds running fp64 sums over the middle of [outer, count, inner], each rounded to fp32 once, as in PyTorch."""

    def body(data: T.Buffer, out: T.Buffer) -> None:
        with tasks(outer * inner, outer * count * inner) as task:
            i, j = task // inner, task % inner
            running = variable(fp64(0.0))
            with T.serial(0, count) as k:
                if exclusive:
                    T.buffer_store(out, to_f32(running[0]), [i, k, j])
                T.buffer_store(running, running[0] + to_f64(data[i, k, j]), [0])
                if not exclusive:
                    T.buffer_store(out, to_f32(running[0]), [i, k, j])

    shape = (outer, count, inner)
    info = kernel("cumsum", lines=outer * inner, count=count)
    return prim_func("cumsum", [Argument("data", shape), Argument("out", shape)], body, info)


def _cumsum(bb: relax.BlockBuilder, node: relax.Call) -> relax.Expr:
    data, attrs = node.args[0], node.attrs
    shape = static_shape(data)
    axis = None if attrs.axis is None else int(attrs.axis)
    exclusive = bool(attrs.exclusive)
    if not shape or math.prod(shape) == 0 or axis is None or str(node.ty.dtype) != "float32":
        return bb.call_te(topi.cumsum, data, axis, str(node.ty.dtype), exclusive)
    view = around(shape, axis)
    function = cumsum_kernel(*view, exclusive)
    return call_on_views(bb, f"cumsum_{'x'.join(map(str, view))}", function, [data], shape)


LEGALIZE: dict[str, Legalize] = {
    "relax.cumsum": _cumsum,
    **{f"relax.{one.name}": _legalize(one.name, partial(reduction_kernel, one)) for one in (SUM, MEAN, PROD, MAX, MIN)},
    "relax.variance": _legalize("variance", partial(variance_kernel, root=False), lines_only=True),
    "relax.std": _legalize("std", partial(variance_kernel, root=True), lines_only=True),
}
"""Legalizations of fp32 reductions, by operator."""

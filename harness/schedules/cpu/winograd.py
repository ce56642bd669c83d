"""Convolutions by minimal filtering (Winograd): fewer multiplications, in products of the usual kind.

The image is cut into patches of n × n pixels that overlap, one for each tile of m × m outputs. Patches and filters are
transformed, multiplied place by place with sums over channels only, and transformed back:

    V[place, c, tile] = (before · patch · beforeᵀ)[place]          U[place, o, c] = (filters · weight · filtersᵀ)[place]
    M[o, place, tile] = Σ_c U[place, o, c] · V[place, c, tile]     output = after · M · afterᵀ

That takes n² instead of r² m² multiplications for each tile, channel and filter of r × r. U is made when the model is
loaded. A task takes a few lines of tiles, and a part of the filters, all the way from the image to the result. V and M
are its thread's, which keeps V for all parts of the filters that it takes.

A number that is not finite spreads over whole tiles on this way. A sum that is not finite is computed again, term by
term, before it is stored, so that infinities and NaN end up where any other convolution puts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, tirx
from tvm.script.ir_builder import tirx as T

from harness.schedules.common.graph import call
from harness.schedules.common.kernel import HELPER, Argument, ceil_div, each_thread_keeps, fp32, prim_func, registers
from harness.schedules.common.kernel_info import FILTERING, KernelInfo, Kind
from harness.schedules.cpu.emit import for_each_vector, multiply_panels, vectors
from harness.schedules.cpu.epilogue import Epilogue
from harness.schedules.cpu.lowering import Lowering
from harness.schedules.cpu.winograd_plan import Plan

_CHUNK = 32
"""Channels that one register accumulates: near √channels rounding is least, and sums of patches need that."""
_INFINITE = 0x7F800000
"""|x| as an integer is at least this exactly if x is infinite or NaN."""


def filtered(plan: Plan, data: relax.Expr, weights: relax.Expr) -> Lowering:
    """Lowers a convolution by minimal filtering."""
    window = plan.window
    weight = (window.filters, window.channels, *window.kernel)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        packed = builder.emit(call(builder, "pack", _pack(plan, weight), [inputs[1]]))
        shape = tuple(int(extent) for extent in packed.ty.shape)
        arguments = [Argument("image", window.image), Argument("packed", shape), Argument("weight", weight)]
        arguments += [*epilogue.arguments, epilogue.result(window.layout)]
        name = "winograd" + epilogue.label
        function = prim_func(name, arguments, lambda *buffers: _emit(plan, epilogue, *buffers), _info(plan, epilogue))
        return call(builder, name, function, [inputs[0], packed, inputs[1], *inputs[2:]])

    return Lowering((data, weights), window.layout, build)


def _info(plan: Plan, epilogue: Epilogue) -> KernelInfo:
    window, blocking = plan.window, plan.blocking
    return KernelInfo(
        Kind.KERNEL,
        "nn.conv2d",
        FILTERING,
        window.sizes,
        tile={"rows": blocking.tile.rows, "columns": blocking.tile.columns},
        decisions={
            "outputs": plan.filtering.outputs**2,
            "multiplications": plan.places,
            "lines": blocking.lines,
            "splits": blocking.splits,
            "groups": blocking.groups,
        },
        writes=epilogue.operators,
        flop=2 * math.prod(window.result) * window.depth,
    )


def _pack(plan: Plan, weight: tuple[int, ...]) -> tirx.PrimFunc:
    """Builds U[place, panel, channel, filter within the panel], in fp64 and rounded once; zero beyond the last."""
    n, rows = plan.filtering.inputs, plan.blocking.tile.rows
    filters, channels = weight[:2]
    shape = (plan.places, plan.panels, channels, rows)
    matrix = plan.filtering.filters

    def body(source: tirx.Buffer, packed: tirx.Buffer) -> None:
        with T.parallel(0, plan.panels) as panel, T.serial(0, channels) as c, T.serial(0, rows) as i:
            taps = registers((3, 3), "float64")
            half = registers((n, 3), "float64")
            at = T.Bind(panel * rows + i)
            for y in range(3):
                for x in range(3):
                    value = tirx.Cast("float64", source[T.min(at, filters - 1), c, y, x])
                    T.buffer_store(taps, value, [y, x])
            for a in range(n):
                for x in range(3):
                    T.buffer_store(half, _combined(matrix[a], _column(taps, x), "float64"), [a, x])
            for a in range(n):
                for b in range(n):
                    value = tirx.Cast("float32", _combined(matrix[b], _row(half, a), "float64"))
                    if filters % rows:
                        value = T.if_then_else(at < filters, value, fp32(0.0))
                    T.buffer_store(packed, value, [a * n + b, panel, c, i])

    return prim_func("pack", [Argument("source", weight), Argument("packed", shape)], body, HELPER)


def _combined(factors: Sequence[Any], value: Callable[[int], Any], dtype: str = "float32") -> Any:
    """Computes Σ factors[k] · value(k), beginning with a term whose factor is 1 if there is one."""
    terms = sorted((k for k, factor in enumerate(factors) if factor), key=lambda k: factors[k] != 1)
    total: Any = None
    for k in terms:
        factor = factors[k]
        size = value(k) if abs(factor) == 1 else value(k) * tirx.const(float(abs(factor)), dtype)
        if total is None:
            total = size if factor > 0 else tirx.const(0.0, dtype) - size
        else:
            total = total + size if factor > 0 else total - size
    return total


def _row(matrix: tirx.Buffer, row: int) -> Callable[[int], Any]:
    """Returns (column) → element of a row."""
    return lambda column: matrix[row, column]


def _taps(row: tirx.Buffer, lane: Any) -> Callable[[int], Any]:
    """Returns (column) → element of a row of vectors."""
    return lambda column: row[column, lane]


def _column(matrix: tirx.Buffer, column: int) -> Callable[[int], Any]:
    """Returns (row) → element of a column."""
    return lambda row: matrix[row, column]


def _across(count: int, lanes: int, body: Callable[[Any, int], None]) -> None:
    """Emits `body(start, width)` for pieces that cover 0 … count; the last one may repeat a part of the one before."""
    if count < lanes:
        for start, width in vectors(count, lanes):
            body(start, width)
        return
    with T.serial(0, ceil_div(count, lanes)) as v:
        body(T.Bind(T.min(v * lanes, count - lanes)) if count % lanes else v * lanes, lanes)


def _emit(plan: Plan, epilogue: Epilogue, *buffers: tirx.Buffer) -> None:
    image, packed, weight, *extras, result = buffers
    window, blocking, tile = plan.window, plan.blocking, plan.blocking.tile
    group, channels = plan.group, window.channels
    lines, across = plan.grid
    blocks = ceil_div(lines, blocking.lines)
    groups = ceil_div(plan.panels, group)
    per_split = ceil_div(groups, blocking.splits)
    store, _ = epilogue.write_back(window.layout, extras, result)
    workspace = (plan.places, channels * plan.tiles), (group * tile.rows, plan.places * plan.tiles)
    # The parts of the filters follow each other, so that a thread has the patches of its block already.
    with each_thread_keeps(window.image[0] * blocks * blocking.splits, "float32", *workspace) as (task, kept):
        patches, products = kept.buffers
        block = T.Bind(task // blocking.splits)
        b = T.Bind(block // blocks)
        first_line = T.Bind(block % blocks * blocking.lines)
        here = T.Bind(T.min(blocking.lines, lines - first_line)) if lines % blocking.lines else blocking.lines
        with kept.unless(block):
            _transform_patches(plan, image, patches, (b, first_line, here))
        first_group = T.Bind(task % blocking.splits * per_split)
        with T.serial(0, T.min(per_split, groups - first_group)) as g:
            first_panel = T.Bind((first_group + g) * group)
            panels = group if plan.panels % group == 0 else T.Bind(T.min(group, plan.panels - first_panel))
            with T.serial(0, plan.places) as at, T.serial(0, ceil_div(here * across, tile.columns)) as r:

                def left(p: Any, first: Any, k: Any, i: int, at: Any = at) -> Any:
                    return packed[at, first_panel + p, first + k, i]

                def right(first: Any, k: Any, j: Any, at: Any = at, r: Any = r) -> Any:
                    return patches[at, (first + k) * plan.tiles + r * tile.columns + j]

                def place(p: Any, i: int, j: Any, at: Any = at, r: Any = r) -> tuple[Any, Any]:
                    return p * tile.rows + i, at * plan.tiles + r * tile.columns + j

                multiply_panels(tile, channels, panels, left, right, products, None, place, _CHUNK)
            first_filter = T.Bind(first_panel * tile.rows)
            with (
                T.serial(0, T.min(group * tile.rows, window.filters - first_filter)) as o,
                T.serial(0, here) as at_line,
            ):
                row = _transform_back(plan, products, o, at_line)
                y = T.Bind((first_line + at_line) * plan.filtering.outputs)
                _repair(plan, row, image, weight, (b, first_filter + o, y))
                rows = window.result[2] % plan.filtering.outputs
                bottom = T.min(plan.filtering.outputs, window.result[2] - y) if rows else plan.filtering.outputs
                with T.serial(0, bottom) as dy:

                    def put(x: Any) -> None:
                        store(b, first_filter + o, (y + dy) * window.result[3] + x, row[dy, x])

                    for_each_vector(window.result[3], tile.lanes, put)


def _transform_patches(plan: Plan, image: tirx.Buffer, patches: tirx.Buffer, block: tuple[Any, Any, Any]) -> None:
    """Emits the transformed patches of a block (image, first line of tiles, number of lines) for all channels."""
    window, matrix = plan.window, plan.filtering.before
    n, m = plan.filtering.inputs, plan.filtering.outputs
    (top, left), (height, width) = window.padding, window.image[2:]
    lanes, across = plan.blocking.tile.lanes, plan.grid[1]
    b, first_line, lines = block
    # Tiles whose m pixels of their own all lie in the image.
    begin, end = ceil_div(left, m), max(ceil_div(left, m), (width + left) // m)
    phases = T.alloc_buffer((plan.blocking.lines * m + n - m, m, across + 1), "float32")
    half = [registers((n, lanes)) for _ in range(n)]
    with T.serial(0, window.channels) as c:
        # Every m-th pixel of a line, for each of the m phases.
        with T.serial(0, lines * m + n - m) as r:
            y = T.Bind(first_line * m + r - top)

            def outside(x: Any, y: Any = y) -> Any:
                inside = tirx.all(y >= 0, y < height, x >= left, x < width + left)
                return T.if_then_else(inside, image[b, c, y, x - left], fp32(0.0))

            with T.If(tirx.all(y >= 0, y < height)):
                with T.Then():
                    with T.serial(begin, min(end, across + 1)) as t:
                        for q in range(m):
                            T.buffer_store(phases, image[b, c, y, t * m + q - left], [r, q, t])
                    for t in [*range(min(begin, across + 1)), *range(end, across + 1)]:
                        for q in range(m):
                            T.buffer_store(phases, outside(t * m + q), [r, q, t])
                with T.Else(), T.serial(0, across + 1) as t:
                    for q in range(m):
                        T.buffer_store(phases, fp32(0.0), [r, q, t])
        with T.serial(0, lines) as at_line:

            def piece(start: Any, width: int, at_line: Any = at_line) -> None:
                for a in range(n):
                    for x in range(n):
                        with T.vectorized(0, width) as j:

                            def pixel(y: int, x: int = x, j: Any = j) -> Any:
                                return phases[at_line * m + y, x % m, start + x // m + j]

                            T.buffer_store(half[a], _combined(matrix[a], pixel), [x, j])
                for a in range(n):
                    for e in range(n):
                        with T.vectorized(0, width) as j:
                            value = _combined(matrix[e], _taps(half[a], j))
                            T.buffer_store(patches, value, [a * n + e, c * plan.tiles + at_line * across + start + j])

            _across(across, lanes, piece)


def _transform_back(plan: Plan, products: tirx.Buffer, o: Any, at_line: Any) -> tirx.Buffer:
    """Emits the outputs [m, pixels of a line] of filter o of a group in one line of tiles of a block."""
    n, m, matrix = plan.filtering.inputs, plan.filtering.outputs, plan.filtering.after
    lanes, across = plan.blocking.tile.lanes, plan.grid[1]
    row = T.alloc_buffer((m, across * m), "float32")
    phases = T.alloc_buffer((m, m, across), "float32")
    half = [registers((n, lanes)) for _ in range(m)]

    def piece(start: Any, width: int) -> None:
        for a in range(m):
            for x in range(n):
                with T.vectorized(0, width) as j:

                    def product(y: int, x: int = x, j: Any = j) -> Any:
                        return products[o, (y * n + x) * plan.tiles + at_line * across + start + j]

                    T.buffer_store(half[a], _combined(matrix[a], product), [x, j])
        for a in range(m):
            for e in range(m):
                with T.vectorized(0, width) as j:
                    value = _combined(matrix[e], _taps(half[a], j))
                    T.buffer_store(phases, value, [a, e, start + j])

    _across(across, lanes, piece)
    with T.serial(0, m) as dy, T.serial(0, across) as t:
        for q in range(m):
            T.buffer_store(row, phases[dy, q, t], [dy, t * m + q])
    return row


def _repair(plan: Plan, row: tirx.Buffer, image: tirx.Buffer, weight: tirx.Buffer, first: tuple[Any, Any, Any]) -> None:
    """Emits the repetition, term by term and in fp64, of the sums in `row` that are not finite.

    Args:
        plan: The convolution.
        row: Outputs, [m, pixels of a line].
        image: The input.
        weight: The filters as they are.
        first: Image, filter and line of the result that the row begins with.
    """
    window, m = plan.window, plan.filtering.outputs
    b, o, y = first
    (top, left), (height, width) = window.padding, window.image[2:]
    pixels = plan.grid[1] * m

    def magnitude(value: Any) -> Any:
        return tirx.bitwise_and(tirx.reinterpret("int32", value), tirx.const(0x7FFFFFFF, "int32"))

    highest = registers((1,), "int32")
    T.buffer_store(highest, tirx.const(0, "int32"), [0])
    with T.serial(0, m) as dy, T.serial(0, pixels) as x:
        T.buffer_store(highest, T.max(highest[0], magnitude(row[dy, x])), [0])
    not_finite = highest[0] >= tirx.const(_INFINITE, "int32")
    with T.If(not_finite), T.Then(), T.serial(0, m) as dy, T.serial(0, pixels) as x:
        found = magnitude(row[dy, x]) >= tirx.const(_INFINITE, "int32")
        with T.If(found), T.Then():
            total = registers((1,), "float64")
            T.buffer_store(total, tirx.const(0.0, "float64"), [0])
            with T.serial(0, window.channels) as c, T.serial(0, 3) as ky, T.serial(0, 3) as kx:
                at, to = y + dy + ky - top, x + kx - left
                with T.If(tirx.all(at >= 0, at < height, to >= 0, to < width)), T.Then():
                    value, factor = (tirx.Cast("float64", v) for v in (image[b, c, at, to], weight[o, c, ky, kx]))
                    T.buffer_store(total, total[0] + value * factor, [0])
            T.buffer_store(row, tirx.Cast("float32", total[0]), [dy, x])

"""Builds convolutions by minimal filtering (Winograd): fewer multiplications, in ordinary products.

The image is cut into patches of n × n pixels that overlap, one for each tile of m × m outputs. Patches and filters are
transformed, multiplied place by place with sums over channels only, and transformed back:

    V[place, c, tile] = (before · patch · beforeᵀ)[place]          U[place, o, c] = (filters · weight · filtersᵀ)[place]
    M[o, place, tile] = Σ_c U[place, o, c] · V[place, c, tile]     output = after · M · afterᵀ

That takes n² instead of r² m² multiplications for each tile, channel and filter of r × r. U is made when the model is
loaded. A task takes a few lines of tiles, and a part of the filters, all the way from the image to the result. V and M
are its thread's, which keeps V for all parts of the filters that it takes.

The pixels of an image that is upsampled by nearest neighbours are equal two by two in each direction. Patches of 3 × 3
pixels of the image before are enough for 2 × 2 outputs then: 9 multiplications instead of 36. Nothing is transformed
but to differences of neighbours, and operands may be rounded to bfloat16.

A number that is not finite spreads over whole tiles on this way. A sum that is not finite is computed again, term by
term, before it is stored, so that infinities and NaN end up where any other convolution puts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

from tvm import relax

from harness.compiler import tir as T
from harness.compiler.schedules.common.graph import argument, call
from harness.compiler.schedules.common.kernel import (
    HELPER,
    Argument,
    ceil_div,
    fp32,
    parallel_with_workspace,
    prim_func,
    registers,
    variable,
)
from harness.compiler.schedules.common.kernel_info import FILTERING, KernelInfo, Kind
from harness.compiler.schedules.cpu.contraction import kernel_name
from harness.compiler.schedules.cpu.emit import for_each_vector, vectors
from harness.compiler.schedules.cpu.epilogue import Epilogue, Store
from harness.compiler.schedules.cpu.lowering import Lowering
from harness.compiler.schedules.cpu.microkernels.microkernel import PanelOfB, PanelsOfA, Sums
from harness.compiler.schedules.cpu.winograd_plan import Plan

_CHUNK = 32
"""Channels that one register accumulates: near √channels rounding is least, and sums of patches need that."""
_INFINITE = 0x7F800000
"""|x| as an integer is at least this exactly if x is infinite or NaN."""


def filtered(plan: Plan, data: relax.Expr, weights: relax.Expr) -> Lowering:
    """Lowers a convolution by minimal filtering.

    Args:
        plan: The convolution.
        data: The image, before it is upsampled.
        weights: Its filters.
    """
    window = plan.window
    weight = (window.filters, window.channels, *window.kernel)
    operator = "winograd" if plan.filtering.repeats == 1 else "winograd_upsampled"

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], epilogue: Epilogue) -> relax.Expr:
        packed = builder.emit(call(builder, "pack", _pack(plan, weight), [inputs[1]]))
        names = {"image": inputs[0], "packed": packed, "weight": inputs[1]}
        operands = [argument(name, value) for name, value in names.items()]
        arguments = [*operands, *epilogue.arguments, epilogue.result(window.layout)]
        name = kernel_name(operator, plan.micro_kernel, epilogue)
        function = prim_func(name, arguments, partial(_emit, plan, epilogue), _info(plan, epilogue))
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


def _pack(plan: Plan, weight: tuple[int, ...]) -> T.PrimFunc:
    """Builds U, in fp64 and rounded to fp32 once; zero beyond the last filter.

    It lies as [place, panel, element of channels, filter within the panel], or with filters before elements where
    panels are multiplied as a whole.
    """
    n, rows, micro_kernel = plan.filtering.inputs, plan.blocking.tile.rows, plan.micro_kernel
    filters, elements = weight[0], plan.elements
    shape = (plan.places, plan.panels, *((rows, elements) if plan.in_panels else (elements, rows)))
    matrix = plan.filtering.filters

    def body(source: T.Buffer, packed: T.Buffer) -> None:
        with T.parallel(0, plan.panels) as panel, T.serial(0, elements) as element, T.serial(0, rows) as i:
            taps = registers((3, 3), "float64")
            half = registers((n, 3), "float64")
            values = registers((micro_kernel.terms, plan.places))
            index = T.Bind(panel * rows + i)
            for term in range(micro_kernel.terms):
                for y in range(3):
                    for x in range(3):
                        c = element + term * elements
                        value = T.Cast("float64", source[T.min(index, filters - 1), c, y, x])
                        T.buffer_store(taps, value, [y, x])
                for a in range(n):
                    for x in range(3):
                        T.buffer_store(half, _combined(matrix[a], [taps[y, x] for y in range(3)]), [a, x])
                for a in range(n):
                    for b in range(n):
                        value = T.Cast("float32", _combined(matrix[b], [half[a, x] for x in range(3)]))
                        T.buffer_store(values, value, [term, a * n + b])
            for place in range(plan.places):
                word = micro_kernel.b.encode([values[term, place] for term in range(micro_kernel.terms)])
                if filters % rows:
                    word = T.if_then_else(index < filters, word, T.const(0, micro_kernel.dtype))
                T.buffer_store(packed, word, [place, panel, *((i, element) if plan.in_panels else (element, i))])

    return prim_func("pack", [Argument("source", weight), Argument("packed", shape, micro_kernel.dtype)], body, HELPER)


def _combined(factors: Sequence[Fraction], values: Sequence[T.Expr]) -> T.Expr:
    """Computes Σ factors[k] · values[k], beginning with a term whose factor is 1 if there is one."""
    dtype = str(values[0].ty)

    def size(k: int) -> T.Expr:
        factor = abs(factors[k])
        return values[k] if factor == 1 else values[k] * T.const(float(factor), dtype)

    first, *others = sorted((k for k, factor in enumerate(factors) if factor), key=lambda k: factors[k] != 1)
    total = size(first) if factors[first] > 0 else T.const(0.0, dtype) - size(first)
    for k in others:
        total = total + size(k) if factors[k] > 0 else total - size(k)
    return total


def _across(count: int, lanes: int, body: Callable[[T.Index, int], None]) -> None:
    """Emits `body(start, width)` for pieces that cover 0 … count; the last one may repeat a part of the one before."""
    if count < lanes:
        for start, width in vectors(count, lanes):
            body(start, width)
        return
    with T.serial(0, ceil_div(count, lanes)) as v:
        body(T.Bind(T.min(v * lanes, count - lanes)) if count % lanes else v * lanes, lanes)


def _patch(plan: Plan, index: T.Index, k: T.Index, r: T.Index, j: T.Index) -> tuple[T.Index, T.Index]:
    """Returns where an element of the patches lies: column j of panel r, in place `index`."""
    columns = plan.blocking.tile.columns
    return index, (r * plan.elements + k) * columns + j if plan.in_panels else k * plan.tiles + r * columns + j


def _product(plan: Plan, o: T.Index, index: T.Index, r: T.Index, j: T.Index) -> tuple[T.Index, T.Index]:
    """Returns where a product lies: filter o of a group, column j of panel r, in place `index`."""
    tile = plan.blocking.tile
    if plan.in_panels:
        return o // tile.rows, (
            (index * (plan.tiles // tile.columns) + r) * tile.rows + o % tile.rows
        ) * tile.columns + j
    return o, index * plan.tiles + r * tile.columns + j


def _column_of(plan: Plan, tile: T.Index) -> tuple[T.Index, T.Index]:
    """Returns panel and column of the first tile of a vector; where panels are not apart, all are one."""
    columns = plan.blocking.tile.columns
    return (tile // columns, tile % columns) if plan.in_panels else (0, tile)


def _emit(plan: Plan, epilogue: Epilogue, *buffers: T.Buffer) -> None:
    image, packed, weight, *extras, result = buffers
    window, blocking, tile, micro_kernel = plan.window, plan.blocking, plan.blocking.tile, plan.micro_kernel
    group, lines = plan.group, plan.grid[0]
    blocks = ceil_div(lines, blocking.lines)
    groups = ceil_div(plan.panels, group)
    per_split = ceil_div(groups, blocking.splits)
    store, _ = epilogue.write_back(window.layout, extras, result)
    of_patches = (plan.places, plan.elements * plan.tiles)
    of_filter = plan.places * plan.tiles
    of_products = (group, tile.rows * of_filter) if plan.in_panels else (group * tile.rows, of_filter)
    # The parts of the filters follow each other, so that a thread has the patches of its block already.
    tasks = parallel_with_workspace(window.image[0] * blocks * blocking.splits, micro_kernel.dtype, of_patches)
    with micro_kernel.imported(), tasks as (task, workspace), micro_kernel.setup():
        (patches,) = workspace.buffers
        products = T.alloc_buffer(of_products, "float32")
        block = T.Bind(task // blocking.splits)
        b = T.Bind(block // blocks)
        first_line = T.Bind(block % blocks * blocking.lines)
        line_count = T.Bind(T.min(blocking.lines, lines - first_line)) if lines % blocking.lines else blocking.lines
        with workspace.fill_once(block):
            _transform_patches(plan, image, patches, (b, first_line, line_count))
        first_group = T.Bind(task % blocking.splits * per_split)
        with T.serial(0, T.min(per_split, groups - first_group)) as g:
            first_panel = T.Bind((first_group + g) * group)
            panels = group if plan.panels % group == 0 else T.Bind(T.min(group, plan.panels - first_panel))
            _multiply(plan, (packed, patches, products), (first_panel, panels, line_count))
            first_filter = T.Bind(first_panel * tile.rows)
            with (
                T.serial(0, T.min(group * tile.rows, window.filters - first_filter)) as o,
                T.serial(0, line_count) as at_line,
            ):
                row = _transform_back(plan, products, o, at_line)
                y = T.Bind((first_line + at_line) * plan.filtering.outputs)
                _repair(plan, row, image, weight, (b, first_filter + o, y))
                _store_lines(plan, row, store, (b, first_filter + o, y))


def _multiply(
    plan: Plan, buffers: tuple[T.Buffer, T.Buffer, T.Buffer], extent: tuple[T.Index, T.Index, T.Index]
) -> None:
    """Emits the products of a group of filters, in every place of the patches.

    Args:
        plan: The convolution.
        buffers: Filters, patches and products.
        extent: First panel of the filters, number of panels, and number of lines of tiles.
    """
    (packed, patches, products), (first_panel, panels, line_count) = buffers, extent
    tile, elements = plan.blocking.tile, plan.elements
    chunk = ceil_div(elements, ceil_div(elements, _CHUNK)) if plan.filtering.repeats == 1 else None
    with T.serial(0, plan.places) as index, T.serial(0, ceil_div(line_count * plan.line, tile.columns)) as r:

        def left(p: T.Index, first: T.Index, k: T.Index, i: int) -> T.Expr:
            return packed[(index, first_panel + p, *((i, first + k) if plan.in_panels else (first + k, i)))]

        plan.micro_kernel.multiply_panels(
            tile,
            elements,
            PanelsOfA(panels, left, stride=elements),
            PanelOfB(lambda first, k, j: patches[_patch(plan, index, first + k, r, j)]),
            Sums(products, lambda p, i, j: _product(plan, p * tile.rows + i, index, r, j)),
            chunk,
        )


def _store_lines(plan: Plan, row: T.Buffer, store: Store, first: tuple[T.Index, T.Index, T.Index]) -> None:
    """Emits the store of the outputs [m, pixels of a line] of one line of tiles, of those lines that there are.

    Args:
        plan: The convolution.
        row: The outputs.
        store: Stores a pixel.
        first: Image, filter and line of the result that the row begins with.
    """
    (b, o, y), (height, width), outputs = first, plan.window.result[2:], plan.filtering.outputs
    with T.serial(0, T.min(outputs, height - y) if height % outputs else outputs) as dy:
        for_each_vector(width, plan.blocking.tile.lanes, lambda x: store(b, o, (y + dy) * width + x, row[dy, x]))


def _transform_patches(plan: Plan, image: T.Buffer, patches: T.Buffer, block: tuple[T.Index, T.Index, T.Index]) -> None:
    """Emits the transformed patches of a block (image, first line of tiles, number of lines) for all channels."""
    matrix, n, step = plan.filtering.before, plan.filtering.inputs, plan.filtering.step
    lanes, terms, elements = plan.blocking.tile.lanes, plan.micro_kernel.terms, plan.elements
    b, first_line, lines = block
    lines_read, width_read = plan.blocking.lines * step + n - step, plan.line + (n - 1) // step
    phases = T.alloc_buffer((terms, lines_read, step, width_read), "float32")
    halves = [[registers((n, lanes)) for _ in range(n)] for _ in range(terms)]
    with T.serial(0, elements) as element:
        for term in range(terms):
            _deinterleave(plan, image, phases, (b, element + term * elements, first_line, lines), term)
        with T.serial(0, lines) as at_line:

            def piece(start: T.Index, width: int, at_line: T.Index = at_line) -> None:
                for term, half in enumerate(halves):
                    for a in range(n):
                        for x in range(n):
                            with T.vectorized(0, width) as j:
                                lines = (at_line * step + y for y in range(n))
                                pixels = [phases[term, line, x % step, start + x // step + j] for line in lines]
                                T.buffer_store(half[a], _combined(matrix[a], pixels), [x, j])
                panel, column = _column_of(plan, at_line * plan.line + start)
                for a in range(n):
                    for e in range(n):
                        with T.vectorized(0, width) as j:
                            values = [_combined(matrix[e], [half[a][x, j] for x in range(n)]) for half in halves]
                            index = _patch(plan, a * n + e, element, panel, column + j)
                            T.buffer_store(patches, plan.micro_kernel.b.encode(values), index)

            _across(plan.line, lanes, piece)


def _deinterleave(
    plan: Plan, image: T.Buffer, phases: T.Buffer, channel: tuple[T.Index, T.Index, T.Index, T.Index], term: int
) -> None:
    """Emits every `step`-th pixel of the lines of a channel, for each of the phases, with zeros around the image.

    Args:
        plan: The convolution.
        image: The image.
        phases: Gets the pixels, [term, line, phase, tile].
        channel: Image, channel, first line of tiles, number of lines.
        term: The place of the channel.
    """
    window, n, step = plan.window, plan.filtering.inputs, plan.filtering.step
    (top, left), (height, width) = window.padding, window.image[2:]
    count = int(phases.shape[3])
    b, c, first_line, lines = channel
    # Tiles whose pixels of their own all lie in the image.
    begin = min(ceil_div(left, step), count)
    end = min(max(begin, (width + left) // step), count)
    with T.serial(0, lines * step + n - step) as r:
        y = T.Bind(first_line * step + r - top)

        def outside(x: T.Index) -> T.Expr:
            inside = T.all(y >= 0, y < height, x >= left, x < width + left)
            return T.if_then_else(inside, image[b, c, y, x - left], fp32(0.0))

        with T.If(T.all(y >= 0, y < height)):
            with T.Then():
                with T.serial(begin, end) as t:
                    for q in range(step):
                        T.buffer_store(phases, image[b, c, y, t * step + q - left], [term, r, q, t])
                for first, last in (edge for edge in ((0, begin), (end, count)) if edge[0] < edge[1]):
                    with T.serial(first, last) as t:
                        for q in range(step):
                            T.buffer_store(phases, outside(t * step + q), [term, r, q, t])
            with T.Else(), T.serial(0, count) as t:
                for q in range(step):
                    T.buffer_store(phases, fp32(0.0), [term, r, q, t])


def _transform_back(plan: Plan, products: T.Buffer, o: T.Index, at_line: T.Index) -> T.Buffer:
    """Emits the outputs [m, pixels of a line] of filter o of a group in one line of tiles of a block."""
    n, m, matrix = plan.filtering.inputs, plan.filtering.outputs, plan.filtering.after
    lanes, across = plan.blocking.tile.lanes, plan.grid[1]
    row = T.alloc_buffer((m, across * m), "float32")
    phases = T.alloc_buffer((m, m, plan.line), "float32")
    half = [registers((n, lanes)) for _ in range(m)]

    def piece(start: T.Index, width: int) -> None:
        panel, column = _column_of(plan, at_line * plan.line + start)
        for a in range(m):
            for x in range(n):
                with T.vectorized(0, width) as j:
                    places = (_product(plan, o, y * n + x, panel, column + j) for y in range(n))
                    T.buffer_store(half[a], _combined(matrix[a], [products[place] for place in places]), [x, j])
        for a in range(m):
            for e in range(m):
                with T.vectorized(0, width) as j:
                    value = _combined(matrix[e], [half[a][x, j] for x in range(n)])
                    T.buffer_store(phases, value, [a, e, start + j])

    _across(plan.line, lanes, piece)
    with T.serial(0, m) as dy, T.serial(0, across) as t:
        for q in range(m):
            T.buffer_store(row, phases[dy, q, t], [dy, t * m + q])
    return row


def _repair(
    plan: Plan, row: T.Buffer, image: T.Buffer, weight: T.Buffer, first: tuple[T.Index, T.Index, T.Index]
) -> None:
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
    (top, left), repeats = window.padding, plan.filtering.repeats
    height, width = (extent * repeats for extent in window.image[2:])
    pixels = plan.grid[1] * m

    def magnitude(value: T.Expr) -> T.Expr:
        return T.bitwise_and(T.reinterpret("int32", value), T.const(0x7FFFFFFF, "int32"))

    highest = variable(0, "int32")
    with T.serial(0, m) as dy, T.serial(0, pixels) as x:
        T.buffer_store(highest, T.max(highest[0], magnitude(row[dy, x])), [0])
    not_finite = highest[0] >= T.const(_INFINITE, "int32")
    with T.If(not_finite), T.Then(), T.serial(0, m) as dy, T.serial(0, pixels) as x:
        is_infinite = magnitude(row[dy, x]) >= T.const(_INFINITE, "int32")
        with T.If(is_infinite), T.Then():
            total = variable(0.0, "float64")
            with T.serial(0, window.channels) as c, T.serial(0, 3) as ky, T.serial(0, 3) as kx:
                index, to = y + dy + ky - top, x + kx - left
                with T.If(T.all(index >= 0, index < height, to >= 0, to < width)), T.Then():
                    pixel = image[b, c, index // repeats, to // repeats]
                    value, factor = (T.Cast("float64", v) for v in (pixel, weight[o, c, ky, kx]))
                    T.buffer_store(total, total[0] + value * factor, [0])
            T.buffer_store(row, T.Cast("float32", total[0]), [dy, x])

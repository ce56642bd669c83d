"""Builds attention whose threads each copy the keys and values of a head, for heads that are small enough.

One task computes blocks of queries of one head. The first task of a head in a thread copies the head's keys and values
into the thread's workspace, one row each, with folded moves and rotations. Then it takes a block of keys past some
blocks of queries, so that repeated reads stay in the second-level cache.

Where an element of the arithmetic has several terms, those of scores are channels and those of results are keys that
follow each other: rows of the strip, so that joining them moves no lane. Copies are of elements.

Where the arithmetic multiplies whole panels, whose left one lies row by row, keys are left panels as they are copied.
The strip of exponentials is a right panel as it is, so that results are transposed, too: values are copied channel by
channel, and are the left panels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import (
    ceil_div,
    chunk_length,
    fp32,
    parallel_with_workspace,
    prim_func,
    registers,
    tail_extent,
)
from harness.compiler.schedules.common.kernel_info import ATTENTION
from harness.compiler.schedules.cpu.attention_operands import Attention
from harness.compiler.schedules.cpu.emit import columns_after, for_each_vector
from harness.compiler.schedules.cpu.microkernels.fp32 import multiply
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel, PanelOfB, PanelsOfA, Sums
from harness.compiler.schedules.cpu.online_softmax import State, exponentials_of, fill, pack_channels, pack_keys
from harness.compiler.schedules.cpu.panels import multiply_panels
from harness.compiler.schedules.cpu.schedule import key_blocks, query_group
from harness.compiler.schedules.cpu.tile import Tile


@dataclass(frozen=True)
class AttentionSchedule:
    """The decisions about an attention.

    Attributes:
        scores: Register tile of the scores, keys × queries.
        output: Register tile of the result, queries × channels; channels × queries for whole panels.
        parts: Parts of the queries of a head.
    """

    scores: Tile
    output: Tile
    parts: int


def per_head_kernel(attention_schedule: AttentionSchedule, attention: Attention) -> T.PrimFunc:
    """Builds the kernel; keys are divided into blocks of equal length (`key_blocks`)."""
    batch, length, heads, channels = attention.query.shape
    count, width = attention.key.shape[1], attention.value.shape[3]
    scores, output = attention_schedule.scores, attention_schedule.output
    columns, lanes = scores.columns, scores.lanes
    blocks = ceil_div(length, columns)
    per_part = ceil_div(blocks, attention_schedule.parts)
    parts = ceil_div(blocks, per_part)
    arithmetic, depth = attention.arithmetic, attention.depth
    by_channel = arithmetic.a.row_major
    panel_width = output.rows if by_channel else output.columns
    channel_panels = ceil_div(width, panel_width)
    padded = channel_panels * panel_width
    blocks_of_keys = key_blocks(count)
    keys_here = count // blocks_of_keys
    step = arithmetic.multiple
    elements = ceil_div(keys_here, arithmetic.terms * step) * step
    padding = elements * arithmetic.terms - keys_here
    group = min(per_part, query_group(count, columns, channels, padded))

    def body(*buffers: T.Buffer) -> None:
        *inputs, result = buffers
        sources, bias = attention.split(inputs)
        all_elements = blocks_of_keys * elements
        copies = (count + scores.rows, depth), (padded, all_elements) if by_channel else (all_elements, padded)
        results_shape = (padded, columns) if by_channel else (columns, padded)
        tasks = parallel_with_workspace(batch * heads * parts, arithmetic.dtype, *copies)
        with arithmetic.imported(), tasks as (task, workspace), arithmetic.setup():
            m = T.Bind(task // parts)
            b, h = T.Bind(m // heads), T.Bind(m % heads)
            keys, values = workspace.buffers
            # A task of the same thread may have copied them for other queries of the head.
            with workspace.fill_once(m):
                pack_channels(attention.key, sources[1], (b, h), keys, lanes, arithmetic=arithmetic)
                pack_keys(attention.value, sources[2], (b, h), values, lanes, keys_here, arithmetic)
            rotated = T.alloc_buffer((columns, depth), arithmetic.dtype)
            queries = T.alloc_buffer((group, depth, columns), arithmetic.dtype)
            highest_of, sums, results = (
                T.alloc_buffer((group, *shape), "float32") for shape in ((columns,), (columns,), results_shape)
            )
            state = State(highest_of, sums, results, by_channel=by_channel)
            of_image, read = attention.axial_bias, bias
            if of_image is not None:
                read = [T.alloc_buffer((group, of_image.rows, columns), "float32")]
            strip = T.alloc_buffer((keys_here + padding, columns), "float32")
            weights = strip if arithmetic.terms == 1 else T.alloc_buffer((elements, columns), arithmetic.dtype)
            result_panels = channel_panels if by_channel else columns // output.rows
            totals = T.alloc_buffer((result_panels, output.size), "float32")
            if padding:
                # Keys that do not exist weigh nothing.
                with T.serial(keys_here, keys_here + padding) as key:
                    for_each_vector(columns, lanes, lambda j: T.buffer_store(strip, fp32(-math.inf), [key, j]))
            first_block = T.Bind(task % parts * per_part)
            blocks_here = T.Bind(tail_extent(per_part, blocks, first_block))
            with T.serial(0, ceil_div(per_part, group)) as g:
                first_of_group = T.Bind(first_block + g * group)
                group_here = T.Bind(T.max(0, T.min(group, blocks_here - g * group)))

                def rows_of(q: Any) -> tuple[Any, Any]:
                    first = T.Bind((first_of_group + q) * columns)
                    return first, columns if length % columns == 0 else T.Bind(T.min(columns, length - first))

                with T.serial(0, group_here) as q:
                    first, rows = rows_of(q)
                    pack_channels(
                        attention.query, sources[0], (b, h), rotated, lanes, first, rows, attention.scale, arithmetic
                    )
                    with T.serial(0, depth) as d, T.serial(0, columns) as j:
                        T.buffer_store(queries, rotated[j, d], [q, d, j])
                    if of_image is not None:
                        of_image.fill(bias, (b, h), q, first, read[0])
                    state.clear(q, lanes)
                with T.serial(0, blocks_of_keys) as block, T.serial(0, group_here) as q:
                    first_key = T.Bind(block * keys_here)
                    first_element = first_key if arithmetic.terms == 1 else T.Bind(block * elements)
                    first = T.Bind((first_of_group + q) * columns)
                    highest, total, factor = (registers((columns,)) for _ in range(3))
                    state.read_highest(q, highest, lanes)
                    place = (b, h, first, q, first_key)
                    _scores(attention, scores, keys, queries, strip, highest, keys_here, place, read)
                    state.rescale(q, highest, factor, lanes)
                    fill(total, columns, lanes, 0.0)

                    def exponentials(first: Any, length: Any, top: Any = highest, total: Any = total) -> None:
                        exponentials_of(
                            attention, scores, strip, weights, top, total, (first, length), padded=padding > 0
                        )

                    _add_results(
                        output, arithmetic, state, (q, first_element), values, weights, totals, factor, exponentials
                    )
                    state.add_sums(q, total, factor, lanes)
                with T.serial(0, group_here) as q:
                    first, rows = rows_of(q)
                    with T.serial(0, rows) as i:
                        weight = T.Bind(state.sums[q, i])

                        def write(c: Any, i: Any = i, weight: Any = weight, q: Any = q, first: Any = first) -> None:
                            value = T.Select(T.EQ(weight, fp32(0.0)), fp32(0.0), state.result(q, i, c) / weight)
                            attention.store(result, value, (b, first + i, h, c))

                        for_each_vector(width, lanes, write)

    tile = {"score rows": scores.rows, "score columns": columns, "rows": output.rows, "columns": output.columns}
    info = attention.info(ATTENTION)
    info = replace(info, tile=tile, decisions={**info.decisions, "parts": parts, "keys at a time": keys_here})
    return prim_func(attention.name, attention.arguments, body, info)


def _scores(
    attention: Attention,
    tile: Tile,
    keys: T.Buffer,
    queries: T.Buffer,
    strip: T.Buffer,
    highest: T.Buffer,
    count: int,
    place: tuple[Any, Any, Any, Any, Any],
    bias: Sequence[T.Buffer],
) -> None:
    """Emits the scores of a block of queries and keys, and raises the highest of each query to them.

    Args:
        attention: The problem.
        tile: The register tile.
        keys: The keys of the head.
        queries: Blocks of queries, transposed.
        strip: Gets the scores, [key, query].
        highest: The highest scores so far, which are updated.
        count: Keys of the block.
        place: Batch, head, first query, number of the block of queries, first key.
        bias: Buffer of the bias, if there is one; the rows of a bias that is of an image.
    """
    b, h, first, q, first_key = place
    length, columns = attention.query.shape[1], tile.columns

    def finish(key: Any, j: Any, value: Any) -> Any:
        query = T.min(first + j, length - 1) if length % columns else first + j
        if attention.axial_bias is not None:
            value = value + attention.axial_bias.value(bias[0], q, j, first_key + key)
        return attention.masked(bias, (b, h, query, first_key + key), value)

    with T.serial(0, ceil_div(count, tile.rows)) as panel:
        product = _tile_of_scores(
            tile,
            attention,
            lambda k, i: keys[first_key + panel * tile.rows + i, k],
            lambda k, j: queries[q, k, j],
        )

        def scores_of(i: int, panel: Any = panel, product: Callable[[int, Any], Any] = product) -> None:
            key = T.Bind(panel * tile.rows + i)
            for start in range(0, columns, tile.lanes):
                with T.vectorized(0, tile.lanes) as lane:
                    j = start + lane
                    T.buffer_store(strip, finish(key, j, product(i, j)), [key, j])
                    T.buffer_store(highest, T.max(highest[j], strip[key, j]), [j])

        for i in range(tile.rows):
            if count % tile.rows:
                with T.If(panel * tile.rows + i < count), T.Then():
                    scores_of(i)
            else:
                scores_of(i)


def _add_results(
    tile: Tile,
    arithmetic: MicroKernel,
    state: State,
    place: tuple[Any, Any],
    values: T.Buffer,
    weights: T.Buffer,
    totals: T.Buffer,
    factor: T.Buffer,
    exponentials: Callable[[Any, Any], None],
) -> None:
    """Emits results = factor · results + weights · values, for a block of queries and of keys.

    Args:
        tile: The register tile.
        arithmetic: MicroKernel of the product.
        state: Has the results.
        place: Number of the block of queries, first element of the keys.
        values: The values of the head.
        weights: The exponentials, [element, query].
        totals: Workspace for the products, [panel, tile].
        factor: One for each query.
        exponentials: (first element, number of elements): emits the exponentials of a chunk.
    """
    (q, first_element), elements, columns = place, int(weights.shape[0]), int(weights.shape[1])
    if arithmetic.a.row_major:
        channels, stride = (int(extent) for extent in values.shape)
        left = PanelsOfA(
            channels // tile.rows,
            lambda p, first, k, i: values[p * tile.rows + i, first_element + first + k],
            stride,
        )
        right = PanelOfB(lambda first, k, j: weights[first + k, j], exponentials)
        chunk = arithmetic.chunk(elements, even=True)
        multiply_panels(arithmetic, tile, elements, left, right, Sums(totals), chunk)
        state.add_by_channel(q, tile, totals, factor)
        return
    panels = int(values.shape[1]) // tile.columns
    if panels > 1:
        chunk = chunk_length(elements)
        with T.serial(0, ceil_div(elements, chunk)) as c:
            exponentials(c * chunk, tail_extent(chunk, elements, c * chunk))
    with T.serial(0, panels) as panel:
        channel = T.Bind(panel * tile.columns)
        left = PanelsOfA(columns // tile.rows, lambda p, first, k, i: weights[first + k, p * tile.rows + i])
        right = PanelOfB(lambda first, k, j: values[first_element + first + k, columns_after(channel, j)])
        if panels == 1:
            right = replace(right, prepare=exponentials)
        multiply_panels(arithmetic, tile, elements, left, right, Sums(totals))
        state.add(q, tile, totals, factor, channel)


def _tile_of_scores(
    tile: Tile, attention: Attention, left: Callable[[Any, int], Any], right: Callable[[Any, Any], Any]
) -> Callable[[int, Any], Any]:
    """Emits one register tile of scores; returns (row, column) → element."""
    depth, arithmetic = attention.depth, attention.arithmetic
    if arithmetic.step is not None and chunk_length(depth) >= depth:
        rows = multiply(arithmetic.step, tile, depth, lambda k, i: (left(k, i),), right)
        return lambda i, j: rows[i][j]
    totals = T.alloc_buffer((1, tile.size), "float32")
    multiply_panels(
        arithmetic,
        tile,
        depth,
        PanelsOfA(1, lambda p, first, k, i: left(first + k, i), stride=depth),
        PanelOfB(lambda first, k, j: right(first + k, j)),
        Sums(totals),
        arithmetic.chunk(depth, even=True),
    )
    return lambda i, j: totals[0, i * tile.columns + j]

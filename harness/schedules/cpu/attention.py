"""Scaled dot-product attention without the full score matrix, its softmax exact and its sums in several levels.

One task computes blocks of queries of one head. It first copies the head's keys and values into its workspace, one row
each, so that whatever moved or rotated them happens on the way. Then it takes a block of keys past some blocks of
queries, so that what it reads again and again stays in the second-level cache. Scores are kept transposed, as a strip
[keys, queries], so that everything that happens per query (maximum, exponentials, their sum) is vectorized over queries
and needs no reduction across lanes:

    strip[key, query] = Σ_d key[key, d] · (scale · query[query, d])  (+ bias, -inf where masked)
    factor = exp(maximum before - maximum),  strip = exp(strip - maximum)
    sum = factor · sum + Σ_key strip
    result[query, c] = factor · result[query, c] + Σ_key strip[key, query] · value[key, c]

and result / sum at the end. The exponentials of a chunk of keys are computed just before the product takes the chunk. A
query whose keys are all masked gives zero, as in PyTorch. A few queries go another way (`few_queries.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax, sym, tirx
from tvm.script.ir_builder import tirx as T

from harness.schedules.common.attention import recognized
from harness.schedules.common.folding import Folded, Reader, fold, stored
from harness.schedules.common.graph import call
from harness.schedules.common.kernel import at_most, ceil_div, chunk_length, fp32, prim_func, registers
from harness.schedules.common.kernel_info import ATTENTION
from harness.schedules.cpu import math as elementary
from harness.schedules.cpu import schedule
from harness.schedules.cpu.attention_operands import Attention
from harness.schedules.cpu.emit import for_each_vector, multiply, multiply_panels
from harness.schedules.cpu.epilogue import Epilogue
from harness.schedules.cpu.few_queries import few_queries_kernel
from harness.schedules.cpu.lowering import Context, Lowering
from harness.schedules.cpu.tile import Tile

_KEYS = 576
"""Keys of a block at most: with values of 64 channels and 48 queries 400 KB, in a second-level cache of 1 MB."""
_GROUP_BYTES = 256 * 1024
"""Queries and results of the blocks of queries that share a pass over the keys; they stay in that cache as well."""


@dataclass(frozen=True)
class Cut:
    """Everything that is decided about an attention.

    Attributes:
        scores: Register tile of the scores, keys × queries.
        output: Register tile of the result, queries × channels.
        parts: Parts of the queries of a head.
    """

    scores: Tile
    output: Tile
    parts: int


def lower_attention(context: Context, attention: ir.Call) -> Lowering | None:
    """`relax.nn.attention` and `relax.nn.attention_bias`, fp32 and of static shape."""
    bias = attention.args[3] if len(attention.args) > 3 else None
    found = recognized(attention, ("float32",), bias)
    if found is None:
        return None
    operands = [fold(context, argument) for argument in attention.args[:3]]
    query, key, value = operands
    problem = schedule.Attention(
        found.batch,
        found.heads,
        found.queries,
        found.keys,
        found.channels,
        found.width,
        None if bias is None else found.bias_dtype,
        found.diagonal is not None,
        found.bias or (),
    )
    decided = context.decide(problem)
    if problem.few(context.unit):
        # Neighbours of two kinds make no vector of channels.
        query, key, value = (
            operand if operand.period == 1 else stored(argument)
            for operand, argument in zip(operands, attention.args[:3], strict=True)
        )
        few = Attention(query, key, value, bias, found.scale, found.diagonal)
        return _lowering(few, lambda a: few_queries_kernel(a, context.unit.lanes, decided["parts"]))
    cut = Cut(
        schedule.tile_of(context.unit, decided),
        schedule.tile_of(context.unit, decided, ("result_rows", "result_vectors")),
        decided["parts"],
    )
    return _lowering(Attention(query, key, value, bias, found.scale, found.diagonal), lambda a: _kernel(cut, a))


def _lowering(attention: Attention, kernel: Callable[[Attention], tirx.PrimFunc]) -> Lowering:
    def permuted(axes: tuple[int, ...]) -> Lowering | None:
        # Dimension d of the permuted result is dimension axes[d] of ours.
        return _lowering(replace(attention, result=tuple(axes.index(d) for d in attention.result)), kernel)

    def build(builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], _epilogue: Epilogue) -> relax.Expr:
        return call(builder, "attention", kernel(attention), inputs)

    return Lowering(attention.inputs, None, build, permuted)


def _kernel(cut: Cut, attention: Attention) -> tirx.PrimFunc:
    batch, length, heads, channels = attention.query.shape
    count, width = attention.key.shape[1], attention.value.shape[3]
    scores, output = cut.scores, cut.output
    columns, lanes = scores.columns, scores.lanes
    blocks = ceil_div(length, columns)
    per_part = ceil_div(blocks, cut.parts)
    parts = ceil_div(blocks, per_part)
    channel_panels = ceil_div(width, output.columns)
    padded = channel_panels * output.columns
    key_blocks = _key_blocks(count)
    keys_here = count // key_blocks
    group = 1 if key_blocks == 1 else max(1, min(per_part, _GROUP_BYTES // (4 * columns * (channels + padded))))

    def body(*buffers: tirx.Buffer) -> None:
        *inputs, result = buffers
        sources, bias = attention.split(inputs)
        with T.parallel(0, batch * heads * parts) as task:
            m = T.Bind(task // parts)
            b, h = T.Bind(m // heads), T.Bind(m % heads)
            keys = T.alloc_buffer((count + scores.rows, channels), "float32")
            values = T.alloc_buffer((count, padded), "float32")
            _copy_rows(attention.key, sources[1], (b, h), keys, lanes)
            _copy_rows(attention.value, sources[2], (b, h), values, lanes)
            rotated = T.alloc_buffer((columns, channels), "float32")
            queries = T.alloc_buffer((group, channels, columns), "float32")
            state = _State(
                *(T.alloc_buffer((group, *shape), "float32") for shape in ((columns,), (columns,), (columns, padded)))
            )
            strip = T.alloc_buffer((keys_here, columns), "float32")
            totals = T.alloc_buffer((columns // output.rows, output.size), "float32")
            first_block = T.Bind(task % parts * per_part)
            blocks_here = T.Bind(at_most(per_part, blocks, first_block))
            with T.serial(0, ceil_div(per_part, group)) as g:
                first_of_group = T.Bind(first_block + g * group)
                group_here = T.Bind(T.max(0, T.min(group, blocks_here - g * group)))

                def rows_of(q: Any) -> tuple[Any, Any]:
                    first = T.Bind((first_of_group + q) * columns)
                    return first, columns if length % columns == 0 else T.Bind(T.min(columns, length - first))

                with T.serial(0, group_here) as q:
                    first, rows = rows_of(q)
                    _copy_rows(attention.query, sources[0], (b, h), rotated, lanes, first, rows, attention.scale)
                    with T.serial(0, channels) as d, T.serial(0, columns) as j:
                        T.buffer_store(queries, rotated[j, d], [q, d, j])
                    state.clear(q, lanes)
                with T.serial(0, key_blocks) as block, T.serial(0, group_here) as q:
                    first_key = T.Bind(block * keys_here)
                    first = T.Bind((first_of_group + q) * columns)
                    highest, total, factor = (registers((columns,)) for _ in range(3))
                    state.read_highest(q, highest, lanes)
                    _scores(attention, scores, keys, queries, strip, highest, (b, h, first, q, first_key), bias)
                    state.raise_to(q, highest, factor, lanes)
                    _fill(total, columns, lanes, 0.0)

                    def exponentials(first: Any, here: Any, top: Any = highest, total: Any = total) -> None:
                        _exponentials(attention, scores, strip, top, total, (first, here))

                    if channel_panels > 1:
                        chunk = chunk_length(keys_here)
                        with T.serial(0, ceil_div(keys_here, chunk)) as c:
                            exponentials(c * chunk, at_most(chunk, keys_here, c * chunk))
                    with T.serial(0, channel_panels) as panel:
                        channel = T.Bind(panel * output.columns)

                        def value_of(first: Any, k: Any, j: Any, channel: Any = channel, key: Any = first_key) -> Any:
                            return values[key + first + k, channel + j]

                        multiply_panels(
                            output,
                            keys_here,
                            columns // output.rows,
                            lambda p, first, k, i: strip[first + k, p * output.rows + i],
                            value_of,
                            totals,
                            before=exponentials if channel_panels == 1 else None,
                        )
                        state.add(q, output, totals, factor, channel)
                    state.add_sums(q, total, factor, lanes)
                with T.serial(0, group_here) as q:
                    first, rows = rows_of(q)
                    with T.serial(0, rows) as i:
                        weight = T.Bind(state.sums[q, i])

                        def write(c: Any, i: Any = i, weight: Any = weight, q: Any = q, first: Any = first) -> None:
                            value = T.Select(tirx.EQ(weight, fp32(0.0)), fp32(0.0), state.results[q, i, c] / weight)
                            T.buffer_store(result, value, attention.place(b, first + i, h, c))

                        for_each_vector(width, lanes, write)

    tile = {"score rows": scores.rows, "score columns": columns, "rows": output.rows, "columns": output.columns}
    info = replace(attention.info(ATTENTION), tile=tile, decisions={"parts": parts, "keys at a time": keys_here})
    return prim_func("attention", attention.arguments, body, info)


def _key_blocks(count: int) -> int:
    """Into how many equal blocks the keys are cut, 1 where none of a fitting size divides them."""
    least = ceil_div(count, _KEYS)
    return next((n for n in range(least, 2 * least) if count % n == 0), 1)


@dataclass(frozen=True)
class _State:
    """What is known of each query of some blocks after some keys: the softmax of the keys so far, not yet divided.

    Attributes:
        highest: Its highest score, [block, query].
        sums: The sum of its exponentials.
        results: Exponentials times values, [block, query, channel].
    """

    highest: tirx.Buffer
    sums: tirx.Buffer
    results: tirx.Buffer

    def clear(self, q: Any, lanes: int) -> None:
        """Emits the state before the first key."""
        _, columns, width = (int(extent) for extent in self.results.shape)
        for_each_vector(columns, lanes, lambda j: T.buffer_store(self.highest, fp32(-math.inf), [q, j]))
        for_each_vector(columns, lanes, lambda j: T.buffer_store(self.sums, fp32(0.0), [q, j]))
        with T.serial(0, columns) as i:
            for_each_vector(width, lanes, lambda c: T.buffer_store(self.results, fp32(0.0), [q, i, c]))

    def read_highest(self, q: Any, highest: tirx.Buffer, lanes: int) -> None:
        """Emits a copy of the highest scores of a block."""
        for_each_vector(int(highest.shape[0]), lanes, lambda j: T.buffer_store(highest, self.highest[q, j], [j]))

    def raise_to(self, q: Any, highest: tirx.Buffer, factor: tirx.Buffer, lanes: int) -> None:
        """Emits factor = exp(old highest - new highest), of which the new one, 0 for -inf, is left in `highest`."""

        def finite(score: Any) -> Any:
            # Without this exp(-inf - -inf) would be NaN where every key is masked.
            return T.Select(tirx.EQ(score, fp32(-math.inf)), fp32(0.0), score)

        def each(j: Any) -> None:
            T.buffer_store(factor, elementary.exp_below_zero(self.highest[q, j] - finite(highest[j])), [j])

        def note(j: Any) -> None:
            T.buffer_store(self.highest, highest[j], [q, j])
            T.buffer_store(highest, finite(highest[j]), [j])

        # Two loops: in one, TVM 0.27 would let `factor` share the memory of the old highest, which then overwrites it.
        for_each_vector(int(highest.shape[0]), lanes, each)
        for_each_vector(int(highest.shape[0]), lanes, note)

    def add(self, q: Any, tile: Tile, totals: tirx.Buffer, factor: tirx.Buffer, channel: Any) -> None:
        """Emits results = factor · results + totals for the channels of one panel."""
        with T.serial(0, int(factor.shape[0])) as i:
            weight = T.Bind(factor[i])

            def each(j: Any) -> None:
                added = totals[i // tile.rows, i % tile.rows * tile.columns + j]
                at = (q, i, channel + j)
                T.buffer_store(self.results, self.results[at] * weight + added, list(at))

            for_each_vector(tile.columns, tile.lanes, each)

    def add_sums(self, q: Any, total: tirx.Buffer, factor: tirx.Buffer, lanes: int) -> None:
        """Emits sums = factor · sums + total."""
        for_each_vector(
            int(total.shape[0]),
            lanes,
            lambda j: T.buffer_store(self.sums, self.sums[q, j] * factor[j] + total[j], [q, j]),
        )


def _copy_rows(
    operand: Folded,
    buffers: Sequence[tirx.Buffer],
    head: tuple[Any, Any],
    target: tirx.Buffer,
    lanes: int,
    first: Any = 0,
    rows: Any = None,
    scale: float = 1.0,
) -> None:
    """Emits target[row, channel] = scale · operand[batch, first + row, head, channel]; zero beyond its edges."""
    _, length, _, channels = operand.shape
    total, padded = (int(extent) for extent in target.shape)
    rows = min(length, total) if rows is None else rows
    analyzer = sym.Analyzer()
    pairs = channels // operand.period

    def value(row: Any, channel: Any) -> Any:
        element = operand.element(Reader(buffers, analyzer), [head[0], first + row, head[1], channel])
        return element if scale == 1.0 else element * fp32(scale)

    with T.serial(0, rows) as row:
        analyzer.bind(row, ir.Range(0, total))
        if operand.period == 1:
            for_each_vector(channels, lanes, lambda c: T.buffer_store(target, value(row, c), [row, c]))
        else:
            with T.serial(0, pairs) as pair:
                analyzer.bind(pair, ir.Range(0, pairs))
                for n in range(operand.period):
                    channel = pair * operand.period + n
                    T.buffer_store(target, value(row, channel), [row, channel])
        if padded > channels:
            with T.serial(channels, padded) as c:
                T.buffer_store(target, fp32(0.0), [row, c])
    if not (isinstance(rows, int) and rows == total):
        with T.serial(rows, total) as row, T.serial(0, padded) as c:
            T.buffer_store(target, fp32(0.0), [row, c])


def _scores(
    attention: Attention,
    tile: Tile,
    keys: tirx.Buffer,
    queries: tirx.Buffer,
    strip: tirx.Buffer,
    highest: tirx.Buffer,
    place: tuple[Any, Any, Any, Any, Any],
    bias: Sequence[tirx.Buffer],
) -> None:
    """Emits the scores of a block of queries and keys, and raises the highest of each query to them.

    Args:
        attention: The problem.
        tile: The register tile.
        keys: Those of the head.
        queries: Blocks of queries, transposed.
        strip: Gets the scores, [key, query].
        highest: Is raised.
        place: Batch, head, first query, number of the block of queries, first key.
        bias: Buffer of the bias, if there is one.
    """
    b, h, first, q, first_key = place
    length, channels, count = attention.query.shape[1], attention.query.shape[3], int(strip.shape[0])
    columns = tile.columns

    def finish(key: Any, j: Any, value: Any) -> Any:
        query = T.min(first + j, length - 1) if length % columns else first + j
        return attention.masked(bias, (b, h, query, first_key + key), value)

    with T.serial(0, ceil_div(count, tile.rows)) as panel:
        product = _tile_of_scores(
            tile,
            channels,
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


def _tile_of_scores(
    tile: Tile, depth: int, left: Callable[[Any, int], Any], right: Callable[[Any, Any], Any]
) -> Callable[[int, Any], Any]:
    """Emits one register tile of scores; returns (row, column) → element."""
    if chunk_length(depth) >= depth:
        rows = multiply(tile, depth, left, right)
        return lambda i, j: rows[i][j]
    totals = T.alloc_buffer((1, tile.size), "float32")
    multiply_panels(
        tile,
        depth,
        1,
        lambda p, first, k, i: left(first + k, i),
        lambda first, k, j: right(first + k, j),
        totals,
    )
    return lambda i, j: totals[0, i * tile.columns + j]


def _exponentials(
    attention: Attention,
    tile: Tile,
    strip: tirx.Buffer,
    highest: tirx.Buffer,
    total: tirx.Buffer,
    chunk: tuple[Any, Any],
) -> None:
    """Emits strip[key, j] = exp(strip[key, j] - highest[j]) for a chunk of keys, and adds their sum to total[j]."""
    first, count = chunk
    partial = registers((tile.columns,))
    _fill(partial, tile.columns, tile.lanes, 0.0)
    with T.serial(0, count) as k:
        for start in range(0, tile.columns, tile.lanes):
            with T.vectorized(0, tile.lanes) as j:
                at = (first + k, start + j)
                term = elementary.exp_below_zero(strip[at] - highest[start + j], vanishes=attention.masks)
                T.buffer_store(strip, term, list(at))
                T.buffer_store(partial, partial[start + j] + strip[at], [start + j])
    for_each_vector(tile.columns, tile.lanes, lambda j: T.buffer_store(total, total[j] + partial[j], [j]))


def _fill(buffer: tirx.Buffer, count: int, lanes: int, value: float) -> None:
    for_each_vector(count, lanes, lambda j: T.buffer_store(buffer, fp32(value), [j]))

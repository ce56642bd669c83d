"""Builds attention that takes keys and values a block at a time, for many keys or a symbolic number of them.

A block of keys and values is packed once, by all threads, and then meets every query before the next block is packed,
so that it stays in the second-level cache of each core. In memory lie two blocks of this length (keys, and values), the
queries as they are multiplied, and the softmax of each query so far: no more than queries and result once again,
however many keys there are. The last block may be shorter; its loops end earlier. What its last chunk of keys lacks is
padded: scores of keys that do not exist are never stored, their weights are zero and so are their values.

Keys are packed chunk by chunk of their channels, values panel by panel of theirs, so that each product reads memory
strictly forward. A chunk of a block of queries stays in the first-level cache and passes all keys of the block. What is
packed are elements of the attention's arithmetic, whose terms are channels of a key, and keys of a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, Index, Readable, Reader
from harness.compiler.schedules.common.kernel import ceil_div, chunk_length, fp32, prim_func, registers
from harness.compiler.schedules.common.kernel_info import ATTENTION
from harness.compiler.schedules.cpu.attention_operands import Attention, Layer
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32, multiply
from harness.compiler.schedules.cpu.microkernels.microkernel import PanelOfB, PanelsOfA, Sums
from harness.compiler.schedules.cpu.online_softmax import (
    State,
    copy_rows,
    exponentials_of,
    fill,
    joined_rows,
    pack_channels,
)
from harness.compiler.schedules.cpu.panels import multiply_panels
from harness.compiler.schedules.cpu.tile import Tile

_BLOCK_BYTES = 512 * 1024
"""Largest size of the keys and values of a block in bytes."""
_MOST_KEYS = 576
"""Largest number of keys of a block, whose scores are a strip of as many lines."""
_CHUNK = 64
"""Largest number of keys whose exponentials, and whose values, one register adds up."""
_TILES = 4
"""Largest number of tiles of keys that a task computes and packs together, if the kernel computes their layer."""
_TASKS = 64
"""Blocks of queries wanted at least in a parallel loop; as many heads are taken together as that needs."""


@dataclass(frozen=True)
class AttentionTiles:
    """The register tiles of scores and results.

    Attributes:
        scores: Keys × queries.
        output: Queries × channels.
    """

    scores: Tile
    output: Tile


@dataclass(frozen=True)
class _Plan:
    """The sizes that follow from an attention and its tiles.

    Attributes:
        attention: The operands.
        tiles: The register tiles.
    """

    attention: Attention
    tiles: AttentionTiles

    @property
    def columns(self) -> int:
        """Returns the number of queries of a block."""
        return self.tiles.scores.columns

    @property
    def lanes(self) -> int:
        """Returns the number of fp32 numbers in a vector."""
        return self.tiles.scores.lanes

    @property
    def blocks(self) -> int:
        """Returns the number of blocks of queries of a head."""
        return int(ceil_div(self.attention.query.shape[1], self.columns))

    @property
    def heads_together(self) -> int:
        """Returns the number of heads that are computed together, a divisor of the number of heads."""
        batch, _, heads, _ = self.attention.query.shape
        count = batch * heads
        return next((n for n in range(1, count) if count % n == 0 and n * self.blocks >= _TASKS), count)

    @property
    def chunk(self) -> int:
        """Returns the number of elements of the depth of a score that one register adds up."""
        return chunk_length(self.attention.depth)

    @property
    def chunks(self) -> int:
        """Returns the number of chunks of the depth of a score."""
        return ceil_div(self.attention.depth, self.chunk)

    @property
    def panels(self) -> int:
        """Returns the number of panels of the channels of a value."""
        return int(ceil_div(self.attention.value.shape[3], self.tiles.output.columns))

    @property
    def padded(self) -> int:
        """Returns the number of channels of a value, padded to whole panels."""
        return self.panels * self.tiles.output.columns

    @property
    def part(self) -> int:
        """Returns the number of keys of a chunk: whole tiles of scores, as many as one register of a result adds up."""
        rows = self.tiles.scores.rows
        return max(1, _CHUNK // rows) * rows

    @property
    def keys(self) -> int:
        """Returns the number of keys of a block: whole chunks, in blocks that are as equal as these allow."""
        count, part = self.attention.keys, self.part
        channels = self.chunks * self.chunk * self.attention.arithmetic.terms
        fitting = min(_MOST_KEYS, _BLOCK_BYTES // (4 * (channels + self.padded)))
        most_keys = max(1, fitting // part) * part
        length = ceil_div(count, ceil_div(count, most_keys)) if isinstance(count, int) else most_keys
        return ceil_div(length, part) * part

    @property
    def packed(self) -> int:
        """Returns the number of keys that a task packs: whole tiles of scores, a divisor of a chunk."""
        rows = self.tiles.scores.rows
        tiles = self.part // rows
        if self.attention.layer is None:
            return rows
        return rows * next(count for count in range(min(_TILES, tiles), 0, -1) if tiles % count == 0)

    @property
    def even(self) -> bool:
        """Returns whether every block of keys is full."""
        count = self.attention.keys
        return isinstance(count, int) and count % self.keys == 0


def streaming_kernel(tiles: AttentionTiles, attention: Attention) -> T.PrimFunc:
    """Builds the kernel; the number of keys may be symbolic."""
    if tiles.scores.rows % attention.arithmetic.terms:
        raise AssertionError("the keys of a tile of scores are whole elements")
    plan = _Plan(attention, tiles)
    batch, _, heads, _ = attention.query.shape
    groups = batch * heads // plan.heads_together

    def body(*buffers: T.Buffer) -> None:
        *inputs, result = buffers
        sources, bias = attention.split(inputs)
        count = attention.keys
        if not isinstance(count, int):
            count = T.Bind(T.Cast("int32", count))
        work = _Workspace.allocated(plan)
        with attention.arithmetic.imported(), T.serial(0, groups) as g:

            def head_of(m: Any) -> tuple[Any, Any]:
                head = T.Bind(g * plan.heads_together + m)
                return T.Bind(head // heads), T.Bind(head % heads)

            _pack_queries(plan, head_of, sources[0], work)
            with T.serial(0, ceil_div(count, plan.keys)) as block:
                first = T.Bind(block * plan.keys)
                key_count = plan.keys if plan.even else T.Bind(T.min(plan.keys, count - first))
                _pack_keys(plan, head_of, sources, work, (first, key_count))
                _attend(plan, head_of, bias, work, (first, key_count))
            _write(plan, head_of, work, result)

    scores, output = tiles.scores, tiles.output
    tile = {
        "score rows": scores.rows,
        "score columns": scores.columns,
        "rows": output.rows,
        "columns": output.columns,
    }
    info = attention.info(ATTENTION)
    decisions = {**info.decisions, "keys at a time": plan.keys, "packed": "by block"}
    return prim_func(attention.name, attention.arguments, body, replace(info, tile=tile, decisions=decisions))


_HeadOf = Callable[[Any], tuple[Any, Any]]
"""Takes the number of a head among those that are computed together, and returns its batch and head."""


@dataclass(frozen=True)
class _Workspace:
    """The buffers of heads that are computed together.

    Attributes:
        queries: [head · block, element of the channels, query].
        keys: [head, chunk, key, element of the chunk].
        values: [head, panel, element of the keys, channel of the panel].
        state: State of the softmax of [head · block].
    """

    queries: T.Buffer
    keys: T.Buffer
    values: T.Buffer
    state: State

    @classmethod
    def allocated(cls, plan: _Plan) -> _Workspace:
        """Emits its allocation."""
        arithmetic, depth = plan.attention.arithmetic, plan.attention.depth
        columns, panel = plan.columns, plan.tiles.output.columns
        blocks = plan.heads_together * plan.blocks

        def buffer(*shape: int) -> T.Buffer:
            return T.alloc_buffer(shape, "float32")

        def operand(*shape: int) -> T.Buffer:
            return T.alloc_buffer(shape, arithmetic.dtype)

        return cls(
            operand(blocks, depth, columns),
            operand(plan.heads_together, plan.chunks, plan.keys, plan.chunk),
            operand(plan.heads_together, plan.panels, plan.keys // arithmetic.terms, panel),
            State(buffer(blocks, columns), buffer(blocks, columns), buffer(blocks, columns, plan.padded)),
        )


def _queries_of(plan: _Plan, q: Any) -> tuple[Any, Any]:
    """Emits the number of the first query of a block, and how many there are."""
    length, columns = plan.attention.query.shape[1], plan.columns
    first = T.Bind(q * columns)
    return first, columns if length % columns == 0 else T.Bind(T.min(columns, length - first))


def _parts_of(length: Any, part: int) -> Any:
    """Emits ⌈length / part⌉ of a positive length; TVM's code generation fails on `//` of one that it counts itself."""
    return ceil_div(length, part) if isinstance(length, int) else T.Bind(T.truncdiv(length + (part - 1), part))


def _pack_queries(plan: _Plan, head_of: _HeadOf, source: Sequence[T.Buffer], work: _Workspace) -> None:
    """Emits the scaled queries, transposed, and the state before the first key."""
    attention, columns, lanes = plan.attention, plan.columns, plan.lanes
    arithmetic, depth = attention.arithmetic, attention.depth
    with T.parallel(0, plan.heads_together * plan.blocks) as task:
        first, rows = _queries_of(plan, task % plan.blocks)
        line = T.alloc_buffer((columns, depth), arithmetic.dtype)
        head = head_of(task // plan.blocks)
        pack_channels(attention.query, source, head, line, lanes, first, rows, attention.scale, arithmetic)
        with T.serial(0, depth) as d, T.serial(0, columns) as j:
            T.buffer_store(work.queries, line[j, d], [task, d, j])
        work.state.clear(task, lanes)


def _pack_keys(
    plan: _Plan,
    head_of: _HeadOf,
    sources: Sequence[Sequence[T.Buffer]],
    work: _Workspace,
    block: tuple[Any, Any],
) -> None:
    """Emits the packing of a block of keys and values, with zeros beyond the last key."""
    attention, lanes, rows = plan.attention, plan.lanes, plan.packed
    arithmetic, depth, panel_width = attention.arithmetic, attention.depth, plan.tiles.output.columns
    terms = arithmetic.terms
    first, key_count = block
    tasks = plan.keys // rows
    with T.parallel(0, plan.heads_together * tasks) as task:
        m, start = T.Bind(task // tasks), T.Bind(task % tasks * rows)
        head = head_of(m)
        count = rows if plan.even else T.Bind(T.max(0, T.min(rows, key_count - start)))
        key = T.alloc_buffer((rows, plan.chunks * plan.chunk), arithmetic.dtype)
        value = T.alloc_buffer((rows, plan.padded), "float32")
        begin = first + start
        computed = attention.key
        if attention.layer is not None:
            computed = _computed(plan, attention.layer, sources[3], head, (begin, count))
        pack_channels(computed, sources[1], head, key, lanes, begin, count, arithmetic=arithmetic)
        copy_rows(attention.value, sources[2], head, value, lanes, begin, count)
        with T.serial(0, rows // terms) as i:
            element = T.Bind(start // terms + i)
            for n, c in product(range(terms), range(plan.chunks)):

                def pack_key(k: Any, n: int = n, c: int = c) -> None:
                    row = element * terms + n
                    T.buffer_store(work.keys, key[i * terms + n, c * plan.chunk + k], [m, c, row, k])

                for_each_vector(min(plan.chunk, depth - c * plan.chunk), lanes, pack_key)
            with T.serial(0, plan.panels) as p:

                def pack_value(j: Any) -> None:
                    joined = joined_rows(arithmetic, value, i, p * panel_width + j)
                    T.buffer_store(work.values, joined, [m, p, element, j])

                for_each_vector(panel_width, lanes, pack_value)


def _computed(
    plan: _Plan, layer: Layer, sources: Sequence[T.Buffer], head: tuple[Any, Any], keys: tuple[Any, Any]
) -> Folded:
    """Emits the layer for the keys of a task; returns the key that reads the layer's result where that put it.

    Args:
        plan: The sizes.
        layer: The layer.
        sources: Its buffers.
        head: Batch and head.
        keys: The first key, and how many there are.
    """
    tile, rows, narrow = plan.tiles.scores, plan.packed, layer.narrow
    begin, count = keys
    buffers, (weight, *bias) = sources[: len(layer.source.inputs)], sources[len(layer.source.inputs) :]
    panels = ceil_div(plan.attention.query.shape[3], tile.columns)
    line = T.alloc_buffer((rows, narrow), "float32")
    copy_rows(layer.source, buffers, head, line, plan.lanes, begin, count)
    result = T.alloc_buffer((rows, panels * tile.columns), "float32")
    with T.serial(0, panels) as panel:
        multiply_panels(
            FP32,
            tile,
            narrow,
            PanelsOfA(rows // tile.rows, lambda p, first, k, i: line[p * tile.rows + i, first + k]),
            PanelOfB(lambda first, k, j: weight[0, panel, first + k, j]),
            Sums(result, lambda p, i, j: (p * tile.rows + i, panel * tile.columns + j)),
        )

    def element(reader: Reader, index: Index) -> Any:
        row = reader.analyzer.simplify(T.convert(index[1] - begin))
        inputs: list[Readable] = list(reader.buffers)
        inputs.insert(layer.place, _Row(result, row, bias))
        return plan.attention.key.element(Reader(inputs, reader.analyzer), index)

    return replace(plan.attention.key, element=element)


@dataclass(frozen=True)
class _Row:
    """Stands in for the layer's result: every row that is read is the row of the key that is packed.

    Attributes:
        result: Products of the keys of a task, [key, channel].
        row: The key.
        bias: What is added to them, if anything is.
    """

    result: T.Buffer
    row: Any
    bias: Sequence[T.Buffer]

    def __getitem__(self, index: tuple[Any, ...]) -> Any:
        value: T.Expr = self.result[self.row, index[-1]]
        for bias in self.bias:
            value = value + bias[(*(0 for _ in bias.shape[1:]), index[-1])]
        return value


def _attend(plan: _Plan, head_of: _HeadOf, bias: Sequence[T.Buffer], work: _Workspace, block: tuple[Any, Any]) -> None:
    """Emits the passage of all blocks of queries past a block of keys."""
    attention, output, columns, lanes = plan.attention, plan.tiles.output, plan.columns, plan.lanes
    arithmetic = attention.arithmetic
    terms = arithmetic.terms
    first_key, key_count = block
    chunk = plan.part
    parts = _parts_of(key_count, chunk)
    padded = terms > 1 and not plan.even

    def fill_up(buffer: T.Buffer, value: float) -> None:
        with T.serial(key_count, parts * chunk) as key:
            for_each_vector(columns, lanes, lambda j: T.buffer_store(buffer, fp32(value), [key, j]))

    with T.parallel(0, plan.heads_together * plan.blocks) as task:
        m = T.Bind(task // plan.blocks)
        strip = T.alloc_buffer((plan.keys, columns), "float32")
        weights = strip if terms == 1 else T.alloc_buffer((plan.keys // terms, columns), arithmetic.dtype)
        totals = T.alloc_buffer((columns // output.rows, output.size), "float32")
        highest, total, factor = (registers((columns,)) for _ in range(3))
        work.state.read_highest(task, highest, lanes)
        place = (*head_of(m), T.Bind(task % plan.blocks * columns), first_key)
        _scores(plan, work, (m, task), strip, highest, key_count, place, bias)
        work.state.rescale(task, highest, factor, lanes)
        fill(total, columns, lanes, 0.0)
        # Keys that do not exist weigh nothing, so that every chunk has the same length.
        if padded:
            fill_up(strip, -math.inf)
        with T.serial(0, parts) as c:
            count = chunk // terms if plan.even or padded else T.min(chunk, key_count - c * chunk)
            of_chunk = (c * (chunk // terms), count)
            exponentials_of(attention, plan.tiles.scores, strip, weights, highest, total, of_chunk, padded=padded)
        if not (plan.even or padded):
            fill_up(strip, 0.0)
        with T.serial(0, plan.panels) as panel:
            multiply_panels(
                arithmetic,
                output,
                parts * (chunk // terms),
                PanelsOfA(columns // output.rows, lambda p, first, k, i: weights[first + k, p * output.rows + i]),
                PanelOfB(lambda first, k, j: work.values[m, panel, first + k, j]),
                Sums(totals),
                chunk // terms,
            )
            work.state.add(task, output, totals, factor, panel * output.columns)
        work.state.add_sums(task, total, factor, lanes)


def _scores(
    plan: _Plan,
    work: _Workspace,
    block_of: tuple[Any, Any],
    strip: T.Buffer,
    highest: T.Buffer,
    key_count: Any,
    place: tuple[Any, Any, Any, Any],
    bias: Sequence[T.Buffer],
) -> None:
    """Emits the scores of a block of queries and keys, and raises the highest of each query to them.

    Args:
        plan: The sizes.
        work: Keys and queries.
        block_of: Head, and block of queries.
        strip: Gets the scores, [key, query].
        highest: The highest scores so far, which are updated.
        key_count: Keys of the block.
        place: Batch, head, first query, first key.
        bias: Buffer of the bias, if there is one.
    """
    attention, tile, chunk = plan.attention, plan.tiles.scores, plan.chunk
    length, depth = attention.query.shape[1], attention.depth
    (m, q), (b, h, first, first_key) = block_of, place

    def finish(p: Any, product: Callable[[int, Any], Any]) -> None:
        for i in range(tile.rows):
            key = p * tile.rows + i
            if plan.even:
                finish_row(key, i, product)
            else:
                with T.If(key < key_count), T.Then():
                    finish_row(key, i, product)

    def finish_row(key: Any, i: int, product: Callable[[int, Any], Any]) -> None:
        key = T.Bind(key)
        for start in range(0, tile.columns, tile.lanes):
            with T.vectorized(0, tile.lanes) as lane:
                j = start + lane
                query = T.min(first + j, length - 1) if length % tile.columns else first + j
                score = attention.masked(bias, (b, h, query, first_key + key), product(i, j))
                T.buffer_store(strip, score, [key, j])
                T.buffer_store(highest, T.max(highest[j], strip[key, j]), [j])

    def left(p: Any, first: Any, k: Any, i: int) -> Any:
        return work.keys[m, first // chunk, p * tile.rows + i, k]

    def right(first: Any, k: Any, j: Any) -> Any:
        return work.queries[q, first + k, j]

    tiles = _parts_of(key_count, tile.rows)
    step = attention.arithmetic.step
    if plan.chunks == 1 and step is not None:
        with T.serial(0, tiles) as p:
            rows = multiply(step, tile, depth, lambda k, i: (left(p, 0, k, i),), lambda k, j: right(0, k, j))
            finish(p, lambda i, j: rows[i][j])
        return
    sums = Sums(
        strip,
        lambda p, i, j: (p * tile.rows + i, j),
        lambda p: finish(p, lambda i, j: strip[p * tile.rows + i, j]),
    )
    multiply_panels(attention.arithmetic, tile, depth, PanelsOfA(tiles, left), PanelOfB(right), sums, chunk)


def _write(plan: _Plan, head_of: _HeadOf, work: _Workspace, result: T.Buffer) -> None:
    """Emits the results: sums of weighted values divided by sums of exponentials; zero if those are zero."""
    attention, state = plan.attention, work.state
    with T.parallel(0, plan.heads_together * plan.blocks) as task:
        b, h = head_of(task // plan.blocks)
        first, rows = _queries_of(plan, task % plan.blocks)
        with T.serial(0, rows) as i:
            weight = T.Bind(state.sums[task, i])

            def write(c: Any) -> None:
                value = T.Select(T.EQ(weight, fp32(0.0)), fp32(0.0), state.results[task, i, c] / weight)
                attention.store(result, value, (b, first + i, h, c))

            for_each_vector(attention.value.shape[3], plan.lanes, write)

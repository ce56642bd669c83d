"""Builds attention that never stores its scores: online softmax, sums in two levels, all in fp32.

A block of threads takes a block of queries of one head and walks over the keys in steps. Queries, and the keys and
values of a step, lie in shared memory; weights take the place of the keys that they came from. Each query has the
highest score so far and the sum of weights, which are rescaled with the result when a higher score appears:

    score[key] = Σ_c key[key, c] · (scale · query[c])  (+ bias, -inf where masked)
    highest'   = max(highest, score of this step),  rescaling = exp(highest - highest')
    weight[key] = exp(score[key] - highest')
    total      = total · rescaling + Σ_key weight[key]
    result     = result · rescaling + Σ_key weight[key] · value[key]

`highest` starts at the lowest finite number, so that no difference of infinities can occur: a key masked with -inf
weighs nothing, and a query whose keys are all masked gives zero, as in PyTorch. The values of a step are added up in
registers of their own and then to the result: sums in two levels. With many steps, or a symbolic number of them, those
of a span are added up first: sums in three levels.

If there are too few queries to keep a GPU busy, groups of threads share the keys of a step, each with a highest score,
a total and a result of its own; they are merged when all keys are done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add

from harness.compiler import tir as T
from harness.compiler.schedules.common.attention import Attention
from harness.compiler.schedules.common.graph import argument
from harness.compiler.schedules.common.kernel import (
    Argument,
    ceil_div,
    chunk_length,
    parts_of,
    prim_func,
    tail_extent,
    where,
)
from harness.compiler.schedules.common.kernel_info import ATTENTION
from harness.compiler.schedules.gpu.folding import Operands
from harness.compiler.schedules.gpu.loading import LANES, BoundOperand, QueryBlock
from harness.compiler.schedules.gpu.threads import (
    MULTIPROCESSORS,
    barrier,
    converted,
    fp32,
    launch,
    local,
    merge_lanes,
    power_of_two,
)
from harness.compiler.schedules.gpu.threads import shared as shared_memory

LOWEST = -3.4028234663852886e38
"""The lowest finite fp32 number."""

_MOST_RESULTS = 128
"""Largest number of fp32 results in a thread, those of all levels of its sums included."""
_MOST_SCORES = 32
"""Largest number of scores of a step in a thread."""
_SPAN = 64
"""Number of steps of a span."""
_MOST_STEPS = 4 * _SPAN
"""Largest number of steps whose sums are added to the result directly, without spans."""


@dataclass(frozen=True)
class AttentionTile:
    """The tile of attention that a block of threads computes.

    Attributes:
        queries: Queries of a block.
        keys: Keys of a step.
        groups: Groups of threads that share the keys of a step.
        rows: Threads of a group along the queries.
        columns: Threads of a group along keys and channels; neighbours in a warp.
    """

    queries: int
    keys: int
    groups: int
    rows: int
    columns: int

    @property
    def threads(self) -> int:
        """Returns the number of threads of a block."""
        return self.groups * self.rows * self.columns

    @property
    def rows_each(self) -> int:
        """Returns the number of queries of a thread."""
        return self.queries // self.rows

    @property
    def keys_each(self) -> int:
        """Returns the number of keys of a thread in a step."""
        return self.keys // (self.groups * self.columns)


@dataclass(frozen=True)
class Layout:
    """The layout of shared memory, in fp32 numbers; rows are padded to whole vectors of four.

    Attributes:
        channels: Length of a row of queries or keys.
        width: Length of a row of values; every thread has the same number of vectors.
        keys: Start of the keys, and then of the weights; queries lie before them.
        values: Start of the values.
        size: Total size; when keys are done, results of groups lie there as well.
    """

    channels: int
    width: int
    keys: int
    values: int
    size: int


def shared_layout(attention: Attention, tile: AttentionTile) -> Layout:
    """Returns the layout of a block's shared memory."""
    channels = 4 * ceil_div(attention.channels, 4)
    width = 4 * tile.columns * ceil_div(attention.width, 4 * tile.columns)
    keys = tile.queries * channels
    values = keys + tile.keys * max(channels, tile.queries)
    merged = tile.groups * tile.queries * (width + 2) if tile.groups > 1 else 0
    return Layout(channels, width, keys, values, max(values + tile.keys * width, merged))


def choose_attention_tile(attention: Attention, shared_bytes: int) -> AttentionTile | None:
    """Chooses the tile of an attention; None if no tile fits heads of this size.

    Args:
        attention: The problem.
        shared_bytes: Largest shared memory of a block.
    """
    columns = 8 if attention.width <= 32 else 16
    longest = max(16, power_of_two(attention.keys)) if isinstance(attention.keys, int) else math.inf
    heads = attention.batch * attention.heads
    wide = [
        AttentionTile(queries, keys, 1, 128 // columns, columns) for queries in (64, 32, 16) for keys in (64, 32, 16)
    ]
    split = [AttentionTile(16, keys, 4, 4, 8) for keys in (32, 64)]
    row_count = power_of_two(attention.queries)
    narrow = [AttentionTile(row_count, 8 * groups, groups, 1, 8) for groups in (16, 8, 4)]
    if row_count <= 8:
        candidates = [*narrow, *split, *wide]
    elif heads * ceil_div(attention.queries, 64) < MULTIPROCESSORS:
        candidates = [*split, *wide]
    else:
        candidates = [*wide, *split]
    candidates.append(AttentionTile(16, 8, 1, 16, 8))  # heads of 256 in the 32 KiB of Metal

    def fits(tile: AttentionTile) -> bool:
        layout = shared_layout(attention, tile)
        return (
            tile.rows_each > 0
            and tile.keys_each > 0
            and tile.rows_each * tile.keys_each <= _MOST_SCORES
            and _levels(attention, tile) * tile.rows_each * (layout.width // tile.columns) <= _MOST_RESULTS
            and 4 * layout.size <= shared_bytes
        )

    fitting = [tile for tile in candidates if fits(tile)]
    return next((tile for tile in fitting if tile.keys <= longest), fitting[0] if fitting else None)


def _levels(attention: Attention, tile: AttentionTile) -> int:
    """Returns the number of levels of the sums of weighted values: steps, result, and spans between them if needed."""
    keys = attention.keys
    return 2 if isinstance(keys, int) and ceil_div(keys, tile.keys) <= _MOST_STEPS else 3


def attention_kernel(attention: Attention, tile: AttentionTile, operands: Operands) -> T.PrimFunc:
    """Builds the kernel (`kernel_of`) for fp32 arithmetic."""
    sizes = {"queries": tile.queries, "keys": tile.keys, "groups": tile.groups, "threads": tile.threads}
    return kernel_of(attention, operands, ATTENTION, sizes, partial(_Emitter, tile=tile))


def kernel_of(
    attention: Attention, operands: Operands, algorithm: str, tile: Mapping[str, int], emitter: Callable[..., Emitter]
) -> T.PrimFunc:
    """Builds a kernel of the operands' inputs, the bias if there is one, and the result [batch, query, head, channel].

    Args:
        attention: The problem.
        operands: Queries, keys and values as they are loaded.
        algorithm: Its name among the facts of the kernel.
        tile: Queries and threads of a block, keys of a step, and other sizes of the tile, by name.
        emitter: Takes the attributes of an emitter, and returns it.
    """
    heads, queries = attention.heads, tile["queries"]
    blocks = ceil_div(attention.queries, queries)

    def body(*buffers: T.Buffer) -> None:
        *inputs, result = buffers
        of_input = dict(zip(operands.inputs, inputs, strict=False))
        sources = [BoundOperand(folded, [of_input[value] for value in folded.inputs]) for folded in operands]
        with launch(attention.batch * heads * blocks, tile["threads"]) as (block, thread):
            m = T.Bind(block // blocks)
            query_block = QueryBlock(T.Bind(m // heads), T.Bind(m % heads), T.Bind(block % blocks * queries))
            bias = inputs[len(operands.inputs) :]
            emitter(_counted(attention), query_block, thread, bias, result, queries, tile["keys"]).emit(*sources)

    info = attention.info(algorithm, [operand.operations > 0 for operand in operands])
    return prim_func("attention", arguments_of(attention, operands), body, replace(info, tile=tile))


def _counted(attention: Attention) -> Attention:
    """Emits 32-bit variables for a symbolic number of keys, and for the diagonal that depends on it."""
    if isinstance(attention.keys, int):
        return attention
    keys, diagonal = T.Bind(T.Cast("int32", attention.keys)), attention.diagonal
    if not isinstance(diagonal, int | None):
        diagonal = T.Bind(T.Cast("int32", diagonal))
    return replace(attention, keys=keys, diagonal=diagonal)


def arguments_of(attention: Attention, operands: Operands) -> list[Argument]:
    """Returns the tensors of a kernel, the result last; a call passes their `free_variables` before it."""
    result = (attention.batch, attention.queries, attention.heads, attention.width)
    return [
        *(argument(f"input{n}", value) for n, value in enumerate(operands.inputs)),
        *([] if attention.bias is None else [Argument("bias", attention.bias, attention.bias_dtype)]),
        Argument("result", result, attention.dtype),
    ]


def comes_out_even(count: T.Index, part: int) -> bool:
    """Returns whether `part` divides the count, as far as it is known."""
    return isinstance(count, int) and count % part == 0


@dataclass
class Emitter:
    """Emits the body of a kernel for one thread.

    Attributes:
        attention: The problem; a symbolic number of keys is a variable of the kernel.
        block: Batch, head and first query of the thread's block.
        thread: The thread.
        bias: The buffer of the bias, if there is one, in a list.
        result: The buffer of the result.
        block_queries: Queries of a block, which may extend beyond the last one.
        step_keys: Keys of a step, which may extend beyond the last one.
    """

    attention: Attention
    block: QueryBlock
    thread: T.Index
    bias: Sequence[T.Buffer]
    result: T.Buffer
    block_queries: int
    step_keys: int

    def emit(self, query: BoundOperand, key: BoundOperand, value: BoundOperand) -> None:
        """Emits the body."""
        raise NotImplementedError

    def masked(self, score: T.Expr, query: T.Index, key: T.Index) -> T.Expr:
        """Adds the bias to the score of a query and a key, by their positions; the result is -inf for a masked key."""
        attention = self.attention
        even = comes_out_even(attention.keys, self.step_keys)
        if attention.bias is not None:
            row = T.min(query, attention.queries - 1) if attention.queries % self.block_queries else query
            column = key if even else T.min(key, attention.keys - 1)
            index = (self.block.batch, self.block.head, row, column)[4 - len(attention.bias) :]
            broadcast = [isinstance(extent, int) and extent == 1 for extent in attention.bias]
            place = tuple(0 if is_broadcast else x for is_broadcast, x in zip(broadcast, index, strict=True))
            bias, masks = self.bias[0][place], attention.bias_dtype == "bool"
            score = T.Select(bias, score, fp32(-math.inf)) if masks else score + fp32(bias)
        if attention.diagonal is not None:
            score = T.Select(key <= query + attention.diagonal, score, fp32(-math.inf))
        return score if even else T.Select(key < attention.keys, score, fp32(-math.inf))

    def steps(self) -> T.Index:
        """Returns the number of steps over the keys that any query of the block sees."""
        step_count = parts_of(self.attention.keys, self.step_keys)
        if self.attention.diagonal is None:
            return step_count
        # One after the last key that the last query sees.
        visible_keys = self.block.first + (self.block_queries + self.attention.diagonal)
        return T.Bind(T.max(0, T.min(step_count, (visible_keys + (self.step_keys - 1)) // self.step_keys)))


@dataclass
class _Emitter(Emitter):
    """Emits the body of the kernel in fp32."""

    tile: AttentionTile

    def __post_init__(self) -> None:
        attention, tile, thread = self.attention, self.tile, self.thread
        self.layout = shared_layout(attention, tile)
        self.column = T.Bind(thread % tile.columns)
        self.row = T.Bind(thread // tile.columns % tile.rows * tile.rows_each)
        self.group_keys = tile.keys // tile.groups
        self.group = T.Bind(thread // (tile.columns * tile.rows)) if tile.groups > 1 else 0
        # Vectors of keys are permuted within their row, so that threads that read other rows meet other banks; weights
        # likewise, so that rows of threads that write at once do.
        vectors_per_row = self.layout.channels // 4
        self.key_twist = min(vectors_per_row & -vectors_per_row, 8)
        rows_at_once = min(32 // tile.columns, tile.rows, max(1, self.group_keys // tile.columns))
        self.weight_twist = thread // tile.columns % rows_at_once * tile.columns if rows_at_once > 1 else 0
        self.vectors = self.layout.width // (4 * tile.columns)
        self.shared = shared_memory(self.layout.size)
        self.scores = local(tile.rows_each * tile.keys_each)
        self.sums = local(tile.rows_each * 4 * self.vectors)
        self.results = local(tile.rows_each * 4 * self.vectors)
        self.highest, self.totals = local(tile.rows_each), local(tile.rows_each)

    def emit(self, query: BoundOperand, key: BoundOperand, value: BoundOperand) -> None:
        attention, tile = self.attention, self.tile
        for i in range(tile.rows_each):
            T.buffer_store(self.highest, fp32(LOWEST), [i])
            T.buffer_store(self.totals, fp32(0.0), [i])
        fill(self.results)
        self._load(query, self.block.first, tile.queries, attention.queries, 0, attention.scale)
        steps = self.steps()
        if _levels(attention, tile) == 2:
            with T.serial(0, steps) as step:
                self._step(key, value, step)
        else:
            self._add_spans(steps, partial(self._step, key, value))
        for i in range(tile.rows_each):
            (total,) = merge_lanes([self.totals[i]], [lambda a, b: a + b], tile.columns, self.thread)
            T.buffer_store(self.totals, total, [i])
        if tile.groups == 1:
            self._store()
        else:
            self._merge_groups()

    def _step(self, key: BoundOperand, value: BoundOperand, step: T.Index) -> None:
        """Emits a step over the keys."""
        attention, tile = self.attention, self.tile
        first = T.Bind(step * tile.keys)
        self._load(key, first, tile.keys, attention.keys, self.layout.keys, twist=self.key_twist)
        self._load(value, first, tile.keys, attention.keys, self.layout.values)
        barrier()
        self._multiply_keys()
        barrier()
        self._weigh(first)
        barrier()
        self._multiply_values()
        barrier()

    def _add_spans(self, steps: T.Index, emit_step: Callable[[T.Index], None]) -> None:
        """Emits `emit_step(step)` for all steps; each span begins at zero and is added to the total when it ends."""
        rows, width = self.tile.rows_each, 4 * self.vectors
        totals, results, previous = local(rows), local(rows * width), local(rows)
        fill(totals)
        fill(results)
        with T.serial(0, parts_of(steps, _SPAN)) as span:
            for i in range(rows):
                T.buffer_store(previous, self.highest[i], [i])
            with T.serial(0, T.min(_SPAN, steps - span * _SPAN)) as step:
                emit_step(span * _SPAN + step)
            for i in range(rows):
                T.buffer_store(previous, T.exp(previous[i] - self.highest[i]), [i])
                T.buffer_store(totals, totals[i] * previous[i] + self.totals[i], [i])
                for n in range(i * width, (i + 1) * width):
                    T.buffer_store(results, results[n] * previous[i] + self.results[n], [n])
            fill(self.totals)
            fill(self.results)
        self.totals, self.results = totals, results

    def _load(
        self,
        source: BoundOperand,
        first: T.Index,
        rows: int,
        length: T.Index,
        base: int,
        scale: float = 1.0,
        twist: int = 1,
    ) -> None:
        """Emits the copy of rows of an operand to shared memory, from position `first` on; zero beyond its edges."""
        channels = source.folded.shape[3]
        width = self.layout.width if base == self.layout.values else self.layout.channels
        vectors_per_row, threads = width // LANES, self.tile.threads

        def copy(index: T.Index) -> None:
            row, vector = T.Bind(index // vectors_per_row), T.Bind(index % vectors_per_row)
            position = T.Bind(first + row)
            limit = None if comes_out_even(length, rows) else length
            values = source.load(self.block, position, vector, limit=limit, padded=width > channels)
            vector_registers = local(LANES)
            for n, value in enumerate(values):
                T.buffer_store(vector_registers, fp32(value) if scale == 1.0 else fp32(value) * fp32(scale), [n])
            target = base + row * width + LANES * (T.bitwise_xor(vector, row % twist) if twist > 1 else vector)
            with T.vectorized(0, LANES) as v:
                T.buffer_store(self.shared, vector_registers[v], [target + v])

        _divide_among_threads(rows * vectors_per_row, threads, self.thread, copy)

    def _multiply_keys(self) -> None:
        """Emits the scores of the thread's queries and keys; many channels are summed in two levels."""
        vectors = self.layout.channels // 4
        chunks = ceil_div(4 * vectors, chunk_length(4 * vectors))
        if chunks == 1:
            self._add_products(self.scores, 0, vectors)
            return
        count, vectors_per_chunk = self.tile.rows_each * self.tile.keys_each, ceil_div(vectors, chunks)
        sums = local(count)
        fill(self.scores)
        with T.serial(0, chunks) as c:
            self._add_products(
                sums, c * vectors_per_chunk, tail_extent(vectors_per_chunk, vectors, c * vectors_per_chunk)
            )
            for n in range(count):
                _accumulate(self.scores, n, sums[n])

    def _add_products(self, sums: T.Buffer, first: T.Index, count: T.Index) -> None:
        """Overwrites the registers with the sums of products over some vectors of channels."""
        tile, channels = self.tile, self.layout.channels
        keys_each = tile.keys_each
        keys, queries = local(4 * keys_each), local(4)
        row = self.layout.keys + (self.group * self.group_keys + self.column) * channels
        fill(sums)
        with T.serial(0, count) as n:
            vector = first + n
            place = T.bitwise_xor(vector, self.column % self.key_twist) if self.key_twist > 1 else vector
            for j in range(keys_each):
                self._take(keys, 4 * j, row + tile.columns * j * channels + 4 * place)
            for i in range(tile.rows_each):
                self._take(queries, 0, (self.row + i) * channels + 4 * vector)
                for j in range(keys_each):
                    for v in range(4):
                        _accumulate(sums, i * keys_each + j, queries[v] * keys[4 * j + v])

    def _weigh(self, first: T.Index) -> None:
        """Replaces scores by weights, and rescales the sums of smaller weights."""
        tile, keys_each = self.tile, self.tile.keys_each
        column = self.group * self.group_keys + self.column
        tops: list[T.Expr] = []
        for i in range(tile.rows_each):
            query = self.block.first + self.row + i
            for j in range(keys_each):
                key, place = first + column + tile.columns * j, i * keys_each + j
                T.buffer_store(self.scores, self.masked(self.scores[place], query, key), [place])
            tops.append(reduce(T.max, self._scores_of(i)))
        tops = merge_lanes(tops, [T.max] * len(tops), tile.columns, self.thread)
        previous = local(1)
        for i, top in enumerate(tops):
            T.buffer_store(previous, self.highest[i], [0])
            T.buffer_store(self.highest, T.max(previous[0], top), [i])
            T.buffer_store(previous, T.exp(previous[0] - self.highest[i]), [0])
            for n in range(4 * self.vectors):
                index = i * 4 * self.vectors + n
                T.buffer_store(self.results, self.results[index] * previous[0], [index])
            T.buffer_store(self.totals, self.totals[i] * previous[0], [i])
            for j in range(keys_each):
                place = i * keys_each + j
                T.buffer_store(self.scores, T.exp(self.scores[place] - self.highest[i]), [place])
                key_place = column + tile.columns * j
                if not isinstance(self.weight_twist, int):
                    key_place = T.bitwise_xor(key_place, self.weight_twist)
                row = self.layout.keys + (self.row + i) * tile.keys
                T.buffer_store(self.shared, self.scores[place], [row + key_place])
            _accumulate(self.totals, i, reduce(add, self._scores_of(i)))

    def _scores_of(self, i: int) -> list[T.Expr]:
        """Returns the scores of the thread's query i in a step, or their weights."""
        keys_each = self.tile.keys_each
        return [self.scores[i * keys_each + j] for j in range(keys_each)]

    def _multiply_values(self) -> None:
        """Emits the sum over a step of weighted values, and its addition to the result."""
        tile, vectors, width = self.tile, self.vectors, self.layout.width
        values, weights = local(16 * vectors), local(4)
        first = self.group * self.group_keys
        fill(self.sums)
        with T.serial(0, self.group_keys // 4) as k:
            for u in range(4):
                row = self.layout.values + (first + 4 * k + u) * width
                for n in range(vectors):
                    self._take(values, 4 * (u * vectors + n), row + 4 * (self.column + tile.columns * n))
            place = 4 * k if isinstance(self.weight_twist, int) else T.bitwise_xor(4 * k, self.weight_twist)
            for i in range(tile.rows_each):
                self._take(weights, 0, self.layout.keys + (self.row + i) * tile.keys + first + place)
                for u in range(4):
                    for n in range(4 * vectors):
                        _accumulate(self.sums, i * 4 * vectors + n, weights[u] * values[4 * u * vectors + n])
        for n in range(tile.rows_each * 4 * vectors):
            _accumulate(self.results, n, self.sums[n])

    def _store(self) -> None:
        tile, vectors = self.tile, self.vectors
        for i in range(tile.rows_each):
            for n in range(vectors):
                self._write(
                    self.row + i,
                    self.column + tile.columns * n,
                    [self.results[(i * vectors + n) * 4 + v] for v in range(4)],
                    self.totals[i],
                )

    def _merge_groups(self) -> None:
        """Emits the results of all groups, rescaled to the highest score of all and added."""
        tile, vectors, width = self.tile, self.vectors, self.layout.width
        statistics = tile.groups * tile.queries * width

        def row_of(group: T.Index, query: T.Index) -> T.Index:
            return group * tile.queries + query

        barrier()
        for i in range(tile.rows_each):
            row = row_of(self.group, self.row + i)
            for n in range(vectors):
                with T.vectorized(0, 4) as v:
                    place = row * width + 4 * (self.column + tile.columns * n) + v
                    T.buffer_store(self.shared, self.results[(i * vectors + n) * 4 + v], [place])
            with T.If(T.EQ(self.column, 0)), T.Then():
                T.buffer_store(self.shared, self.highest[i], [statistics + 2 * row])
                T.buffer_store(self.shared, self.totals[i], [statistics + 2 * row + 1])
        barrier()

        def merge(index: T.Index) -> None:
            query, vector = T.Bind(index // (width // 4)), T.Bind(index % (width // 4))
            top, factor, total, part, sums = local(1), local(1), local(1), local(4), local(4)
            T.buffer_store(top, fp32(LOWEST), [0])
            T.buffer_store(total, fp32(0.0), [0])
            fill(sums)
            with T.serial(0, tile.groups) as g:
                T.buffer_store(top, T.max(top[0], self.shared[statistics + 2 * row_of(g, query)]), [0])
            with T.serial(0, tile.groups) as g:
                row = T.Bind(row_of(g, query))
                T.buffer_store(factor, T.exp(self.shared[statistics + 2 * row] - top[0]), [0])
                _accumulate(total, 0, factor[0] * self.shared[statistics + 2 * row + 1])
                self._take(part, 0, row * width + 4 * vector)
                for v in range(4):
                    _accumulate(sums, v, factor[0] * part[v])
            self._write(query, vector, [sums[v] for v in range(4)], total[0])

        _divide_among_threads(tile.queries * width // 4, tile.threads, self.thread, merge)

    def _write(self, row: T.Index, vector: T.Index, values: list[T.Expr], total: T.Expr) -> None:
        """Emits the store of four channels of a query's result, divided by the sum of weights."""
        attention = self.attention
        width, dtype = attention.width, attention.dtype
        query = self.block.first + row
        vector_registers = local(4, dtype)
        for v, value in enumerate(values):
            mean = T.Select(T.EQ(total, fp32(0.0)), fp32(0.0), value / total)
            T.buffer_store(vector_registers, converted(mean, dtype), [v])

        def store(v: T.Index) -> None:
            T.buffer_store(self.result, vector_registers[v], [self.block.batch, query, self.block.head, 4 * vector + v])

        conditions: list[T.Operand] = [] if attention.queries % self.tile.queries == 0 else [query < attention.queries]
        if width % 4 == 0:
            conditions += [vector < width // 4] if self.layout.width > width else []
            with where(*conditions), T.vectorized(0, 4) as lane:
                store(lane)
        else:
            for v in range(4):
                with where(*conditions, 4 * vector + v < width):
                    store(v)

    def _take(self, registers: T.Buffer, offset: int, place: T.Index) -> None:
        """Emits the copy of a vector of four from shared memory."""
        with T.vectorized(0, 4) as v:
            T.buffer_store(registers, self.shared[place + v], [offset + v])


def _divide_among_threads(count: int, threads: int, thread: T.Index, body: Callable[[T.Index], None]) -> None:
    """Emits `body(index)` for 0 … count, divided among the threads."""
    with T.serial(0, ceil_div(count, threads)) as n:
        index = T.Bind(n * threads + thread)
        with where(*([] if count % threads == 0 else [index < count])):
            body(index)


def fill(registers: T.Buffer) -> None:
    """Emits zeros in all registers."""
    for n in range(int(registers.shape[0])):
        T.buffer_store(registers, fp32(0.0), [n])


def _accumulate(registers: T.Buffer, index: int, value: T.Expr) -> None:
    T.buffer_store(registers, registers[index] + value, [index])

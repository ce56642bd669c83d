"""Emits the passage of a block of queries past a block of keys: scores, softmax and results in a strip [keys, queries].

Both schedules that pack keys and values are made of it. They differ in who packs them, and in how they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, parts_of, registers, tail_extent, where
from harness.compiler.schedules.common.kernel_info import ATTENTION, KernelInfo
from harness.compiler.schedules.cpu import math as elementary
from harness.compiler.schedules.cpu.attention.operands import Attention
from harness.compiler.schedules.cpu.attention.packing import joined_rows, pack_channels
from harness.compiler.schedules.cpu.attention.score_mod import Buffers, Head, Position, finite
from harness.compiler.schedules.cpu.emit import fill, for_each_vector
from harness.compiler.schedules.cpu.microkernels.fp32 import multiply
from harness.compiler.schedules.cpu.microkernels.microkernel import PanelOfB, PanelsOfA, Sums
from harness.compiler.schedules.cpu.tile import Tile

_Score = Callable[[int, T.Index], T.Expr]
"""Takes row and column of a tile of scores, and returns the product."""
_Before = Callable[[T.Index, T.Index], None]
"""Takes the first element and the number of elements of a chunk of keys, and emits its weights."""


@dataclass(frozen=True)
class Plan:
    """The sizes that follow from an attention and its register tiles.

    Attributes:
        attention: The operands.
        scores: Register tile of the scores, keys × queries.
        output: Register tile of the results, queries × channels; channels × queries for whole panels.
    """

    attention: Attention
    scores: Tile
    output: Tile

    @property
    def columns(self) -> int:
        """Returns the number of queries of a block."""
        return self.scores.columns

    @property
    def lanes(self) -> int:
        """Returns the number of fp32 numbers in a vector."""
        return self.scores.lanes

    @property
    def heads(self) -> int:
        """Returns the number of heads of all batches."""
        return self.attention.problem.batch * self.attention.problem.heads

    @property
    def blocks(self) -> int:
        """Returns the number of blocks of queries of a head."""
        return ceil_div(self.attention.problem.queries, self.columns)

    @property
    def by_channel(self) -> bool:
        """Returns whether results are [channel, query], because the strip is a right panel as it is."""
        return self.attention.micro_kernel.a.row_major

    @property
    def panel_width(self) -> int:
        """Returns the number of channels of a panel."""
        return self.output.rows if self.by_channel else self.output.columns

    @property
    def panels(self) -> int:
        """Returns the number of panels of the channels of a value."""
        return ceil_div(self.attention.problem.width, self.panel_width)

    @property
    def padded(self) -> int:
        """Returns the number of channels of a value, padded to whole panels."""
        return self.panels * self.panel_width

    @property
    def chunk(self) -> int:
        """Returns the number of elements of the depth of a score that are added up at a time."""
        return self.attention.micro_kernel.chunk(self.attention.depth, even=True)

    def for_each_query(self, body: Callable[[T.Index], None]) -> None:
        """Emits `body(query)` for the queries of a block, in vectors."""
        for_each_vector(self.columns, self.lanes, body)

    def head(self, m: T.Expr) -> Head:
        """Emits batch and number of head m of all."""
        heads = self.attention.problem.heads
        return T.Bind(m // heads), T.Bind(m % heads)

    def queries_from(self, block: T.Index) -> tuple[T.Var, T.Index]:
        """Emits the number of the first query of a block, and how many there are."""
        length, columns = self.attention.problem.queries, self.columns
        first = T.Bind(block * columns)
        return first, columns if length % columns == 0 else T.Bind(T.min(columns, length - first))

    def info(self, decisions: dict[str, str | int]) -> KernelInfo:
        """Returns the facts of a kernel with these decisions."""
        tile = {"score rows": self.scores.rows, "score columns": self.scores.columns}
        tile |= {"rows": self.output.rows, "columns": self.output.columns}
        return replace(self.attention.info(ATTENTION, decisions), tile=tile)


@dataclass(frozen=True)
class QueryBlock:
    """A block of queries.

    Attributes:
        number: Its number in the buffers.
        head: Batch and head.
        first: Its first query.
    """

    number: T.Index
    head: Head
    first: T.Expr


@dataclass(frozen=True)
class Work:
    """The state of blocks of queries after some keys: the softmax of these keys, not yet divided by its sum.

    Attributes:
        plan: The sizes.
        sources: The buffers of the inputs, and those that score changes keep, by role.
        queries: The queries, transposed: [block, element of the depth, query].
        highest: The highest score of each, [block, query].
        sums: The sum of its exponentials.
        results: Exponentials times values, [block, query, channel]; [block, channel, query] for whole panels.
    """

    plan: Plan
    sources: Buffers
    queries: T.Buffer
    highest: T.Buffer
    sums: T.Buffer
    results: T.Buffer

    @classmethod
    def allocated(cls, plan: Plan, sources: Buffers, blocks: int) -> Work:
        """Emits the allocation for so many blocks."""
        attention, columns = plan.attention, plan.columns
        queries = T.alloc_buffer((blocks, attention.depth, columns), attention.micro_kernel.dtype)
        highest, sums = (T.alloc_buffer((blocks, columns), "float32") for _ in range(2))
        shape = (plan.padded, columns) if plan.by_channel else (columns, plan.padded)
        results = T.alloc_buffer((blocks, *shape), "float32")
        buffers = dict(sources)
        for mod in attention.score_mods:
            buffers |= mod.allocated(blocks, columns)
        return cls(plan, buffers, queries, highest, sums, results)

    def prepare(self, line: T.Buffer, block: QueryBlock, count: T.Index) -> None:
        """Emits the packing of `count` queries of a block, through [query, element], and all before their first key."""
        plan, attention, q = self.plan, self.plan.attention, block.number
        rows = attention.query_rows(self.sources, block.head)
        pack_channels(rows, line, plan.lanes, block.first, count, attention.micro_kernel)
        with T.serial(0, attention.depth) as d, T.serial(0, plan.columns) as j:
            T.buffer_store(self.queries, line[j, d], [q, d, j])
        for mod in attention.score_mods:
            mod.fill(self.sources, block.head, q, block.first)
        fill(self.highest, plan.lanes, -math.inf, q)
        fill(self.sums, plan.lanes, 0.0, q)
        with T.serial(0, int(self.results.shape[1])) as i:
            fill(self.results, plan.lanes, 0.0, q, i)

    def rescale(self, q: T.Index, highest: T.Buffer, factor: T.Buffer) -> None:
        """Emits factor = exp(old highest - new highest), of which the new one, 0 for -inf, is left in `highest`."""

        def store_factor(j: T.Index) -> None:
            T.buffer_store(factor, elementary.exp_below_zero(self.highest[q, j] - finite(highest[j])), [j])

        def note(j: T.Index) -> None:
            T.buffer_store(self.highest, highest[j], [q, j])
            T.buffer_store(highest, finite(highest[j]), [j])

        # Two loops: in one, TVM 0.27 would let `factor` share the memory of the old highest, which then overwrites it.
        self.plan.for_each_query(store_factor)
        self.plan.for_each_query(note)

    def add(self, q: T.Index, totals: T.Buffer, factor: T.Buffer, channel: T.Index = 0) -> None:
        """Emits results = factor · results + totals for the channels of one panel, or for all if they come first.

        Args:
            q: Number of the block.
            totals: [tile, row · column].
            factor: One for each query.
            channel: The first channel of the panel.
        """
        tile = self.plan.output
        with T.serial(0, int(self.results.shape[1])) as i:
            of_query = None if self.plan.by_channel else T.Bind(factor[i])

            def accumulate(j: T.Index) -> None:
                added = totals[i // tile.rows, i % tile.rows * tile.columns + j]
                index = (q, i, channel + j)
                weight = factor[j] if of_query is None else of_query
                T.buffer_store(self.results, self.results[index] * weight + added, index)

            for_each_vector(tile.columns, tile.lanes, accumulate)

    def write(self, block: QueryBlock, count: T.Index, result: T.Buffer) -> None:
        """Emits the results of the first `count` queries of a block."""
        attention, q = self.plan.attention, block.number
        with T.serial(0, count) as i:
            weight = T.Bind(self.sums[q, i])

            def store(c: T.Index) -> None:
                value = self.results[q, c, i] if self.plan.by_channel else self.results[q, i, c]
                attention.store(result, value, weight, block.head, block.first + i, c)

            for_each_vector(attention.problem.width, self.plan.lanes, store)


@dataclass(frozen=True)
class Strip:
    """The buffers of the passage of a block of queries past a block of keys.

    Attributes:
        scores: [key, query].
        weights: Their exponentials, [element of the keys, query]: the same buffer where elements are fp32.
        totals: Products of a panel with the values, [tile, row · column].
    """

    scores: T.Buffer
    weights: T.Buffer
    totals: T.Buffer

    @classmethod
    def allocated(cls, plan: Plan, keys: int) -> Strip:
        """Emits the allocation for so many keys, which are whole elements."""
        micro_kernel, columns = plan.attention.micro_kernel, plan.columns
        scores = T.alloc_buffer((keys, columns), "float32")
        elements = (keys // micro_kernel.terms, columns)
        weights = scores if micro_kernel.terms == 1 else T.alloc_buffer(elements, micro_kernel.dtype)
        tiles = plan.panels if plan.by_channel else columns // plan.output.rows
        return cls(scores, weights, T.alloc_buffer((tiles, plan.output.size), "float32"))

    def pad(self, first: T.Index, end: T.Index, lanes: int, value: float) -> None:
        """Emits one score for all lines from a first one on."""
        with T.serial(first, end) as key:
            fill(self.scores, lanes, value, key)


@dataclass(frozen=True)
class KeyBlock:
    """A block of keys and values.

    Attributes:
        first: Its first key.
        count: The number of its keys. If it is not constant, the strip is padded after them, to whole chunks.
        elements: Elements of the keys.
        chunk: Elements whose exponentials one register adds up.
        chunks: The number of chunks.
        padded: Whether there are scores of -inf for keys that do not exist.
        by_chunk: Whether keys lie chunk by chunk of the depth, so that a chunk of the queries passes all of them.
        key: (tile of keys, first element of a chunk of the depth, number counted from it, row) → element.
        value: (panel, its first channel, first element of a chunk of keys, number counted from it, channel counted from
            the first) → element.
        stride: Elements from one channel to the next, for results by channel.
    """

    first: T.Expr
    count: T.Index
    elements: T.Index
    chunk: int
    chunks: T.Index
    padded: bool
    by_chunk: bool
    key: Callable[[T.Index, T.Index, T.Index, int], T.Expr]
    value: Callable[[T.Index, T.Index, T.Index, T.Index, T.Index], T.TensorLoad]
    stride: int | None = None

    @property
    def depth(self) -> T.Index:
        """Returns the depth of the product with the values."""
        return self.elements if isinstance(self.count, int) else self.chunks * self.chunk

    def elements_from(self, first: T.Index) -> T.Index:
        """Returns the number of elements of the chunk that begins with this one."""
        if isinstance(self.elements, int):
            return tail_extent(self.chunk, self.elements, first)
        return self.chunk if self.padded else T.min(self.chunk, self.elements - first)


@dataclass(frozen=True)
class Passage:
    """The passage of a block of queries past a block of keys.

    Attributes:
        work: The state of blocks of queries.
        strip: Its buffers.
        queries: The block of queries.
        keys: The block of keys.
    """

    work: Work
    strip: Strip
    queries: QueryBlock
    keys: KeyBlock

    @property
    def plan(self) -> Plan:
        """Returns the sizes."""
        return self.work.plan

    def emit(self) -> None:
        """Emits scores, exponentials and results."""
        plan, keys, work, q = self.plan, self.keys, self.work, self.queries.number
        highest, total, factor = (registers((plan.columns,)) for _ in range(3))
        plan.for_each_query(lambda j: T.buffer_store(highest, work.highest[q, j], [j]))
        self._store_scores(highest)
        work.rescale(q, highest, factor)
        fill(total, plan.lanes, 0.0)
        exponentials = partial(self._weigh, highest, total)
        # Where one product takes all weights, it takes those of a chunk as soon as they are computed.
        interleaved = not keys.by_chunk and (plan.by_channel or plan.panels == 1)
        if not interleaved:
            self._weigh_all(exponentials)
        self._add_results(factor, exponentials if interleaved else None)
        plan.for_each_query(lambda j: T.buffer_store(work.sums, work.sums[q, j] * factor[j] + total[j], [q, j]))

    def _store_scores(self, highest: T.Buffer) -> None:
        """Emits the scores, and raises the highest of each query to them."""
        plan, keys, tile = self.plan, self.keys, self.plan.scores
        full = isinstance(keys.count, int) and keys.count % tile.rows == 0

        def finish(p: T.Index, score: _Score) -> None:
            for i in range(tile.rows):
                key = p * tile.rows + i
                with where(*([] if full else [key < keys.count])):
                    self._store_line(highest, T.Bind(key), partial(score, i))

        tiles = parts_of(keys.count, tile.rows)
        if not (keys.by_chunk and plan.chunk < plan.attention.depth):
            with T.serial(0, tiles) as p:
                finish(p, self._tile_of_scores(p))
            return
        scores = self.strip.scores
        sums = Sums(
            scores,
            lambda p, i, j: (p * tile.rows + i, j),
            lambda p: finish(p, lambda i, j: scores[p * tile.rows + i, j]),
        )
        attention, a, b = plan.attention, PanelsOfA(tiles, keys.key), PanelOfB(self._query)
        attention.micro_kernel.multiply_panels(tile, attention.depth, a, b, sums, plan.chunk)

    def _query(self, first: T.Index, k: T.Index, j: T.Index) -> T.TensorLoad:
        return self.work.queries[self.queries.number, first + k, j]

    def _tile_of_scores(self, p: T.Index) -> _Score:
        """Emits the products of one tile of keys; returns (row, column) → product."""
        key, tile, attention = self.keys.key, self.plan.scores, self.plan.attention
        depth, micro_kernel = attention.depth, attention.micro_kernel
        if micro_kernel.step is not None and self.plan.chunk >= depth:
            rows = multiply(micro_kernel.step, tile, depth, lambda k, i: (key(p, 0, k, i),), partial(self._query, 0))
            return lambda i, j: rows[i][j]
        totals = T.alloc_buffer((1, tile.size), "float32")
        a = PanelsOfA(1, lambda _, first, k, i: key(p, first, k, i), stride=depth)
        micro_kernel.multiply_panels(tile, depth, a, PanelOfB(self._query), Sums(totals), self.plan.chunk)
        return lambda i, j: totals[0, i * tile.columns + j]

    def _store_line(self, highest: T.Buffer, key: T.Var, score: Callable[[T.Index], T.Expr]) -> None:
        """Emits the scores of one key, with all changes; `score` takes a query's number in the block."""
        attention, strip, columns, lanes = self.plan.attention, self.strip.scores, self.plan.columns, self.plan.lanes
        length, first = attention.problem.queries, self.queries.first
        for start in range(0, columns, lanes):
            with T.vectorized(0, lanes) as lane:
                j = start + lane
                query = T.min(first + j, length - 1) if length % columns else first + j
                position = Position(*self.queries.head, query, self.keys.first + key, self.queries.number, j)
                T.buffer_store(strip, attention.modified(self.work.sources, position, score(j)), [key, j])
                T.buffer_store(highest, T.max(highest[j], strip[key, j]), [j])

    def _weigh_all(self, exponentials: _Before) -> None:
        """Emits the exponentials of all chunks; weights of keys that do not exist become zero."""
        keys, lanes = self.keys, self.plan.lanes
        end = keys.chunks * (keys.chunk * self.plan.attention.micro_kernel.terms)
        ends_early = not isinstance(keys.count, int)
        if ends_early and keys.padded:
            self.strip.pad(keys.count, end, lanes, -math.inf)
        with T.serial(0, keys.chunks) as c:
            first = c * keys.chunk
            exponentials(first, keys.elements_from(first))
        if ends_early and not keys.padded:
            self.strip.pad(keys.count, end, lanes, 0.0)

    def _weigh(self, highest: T.Buffer, total: T.Buffer, first: T.Index, count: T.Index) -> None:
        """Emits weights[key, j] = exp(score[key, j] - highest[j]) for a chunk of keys, and adds their sum to total[j].

        Args:
            highest: The highest scores.
            total: Sums of the exponentials before rounding.
            first: The first element.
            count: The number of elements.
        """
        columns, lanes = self.plan.columns, self.plan.lanes
        sums = registers((columns,))
        fill(sums, lanes, 0.0)
        with T.serial(0, count) as k:
            for start in range(0, columns, lanes):
                self._weigh_vector(highest, sums, first + k, start)
        for_each_vector(columns, lanes, lambda j: T.buffer_store(total, total[j] + sums[j], [j]))

    def _weigh_vector(self, highest: T.Buffer, sums: T.Buffer, element: T.Expr, start: int) -> None:
        """Emits the weights of an element of the keys for a vector of queries from `start` on."""
        micro_kernel, lanes, strip = self.plan.attention.micro_kernel, self.plan.lanes, self.strip.scores
        terms = micro_kernel.terms
        exponential = elementary.exp_below_zero if terms == 1 else elementary.exp_below_zero_for_bf16
        # Scores of masked keys are -inf.
        flush_subnormals = bool(self.plan.attention.score_mods) or self.keys.padded
        exact = strip if terms == 1 else registers((terms, self.plan.columns))
        for n in range(terms):
            with T.vectorized(0, lanes) as j:
                score = strip[element * terms + n, start + j]
                index = (element if terms == 1 else n, start + j)
                term = exponential(score - highest[start + j], flush_subnormals=flush_subnormals)
                T.buffer_store(exact, term, index)
                T.buffer_store(sums, sums[start + j] + exact[index], [start + j])
        if terms > 1:
            with T.vectorized(0, lanes) as j:
                joined = joined_rows(micro_kernel, exact, 0, start + j)
                T.buffer_store(self.strip.weights, joined, [element, start + j])

    def _add_results(self, factor: T.Buffer, before: _Before | None) -> None:
        """Emits results = factor · results + weights · values, after `before` of each chunk where that is given."""
        plan, keys, output, q = self.plan, self.keys, self.plan.output, self.queries.number
        weights, totals = self.strip.weights, self.strip.totals
        kernel, depth, chunk = plan.attention.micro_kernel, keys.depth, keys.chunk
        prepare = before or (lambda first, count: None)
        if plan.by_channel:
            a = PanelsOfA(
                plan.panels,
                lambda p, first, k, i: keys.value(p, p * output.rows, first, k, i),
                keys.stride,
            )
            b = PanelOfB(lambda first, k, j: weights[first + k, j], prepare)
            kernel.multiply_panels(output, depth, a, b, Sums(totals), chunk)
            self.work.add(q, totals, factor)
            return
        a = PanelsOfA(plan.columns // output.rows, lambda p, first, k, i: weights[first + k, p * output.rows + i])
        with T.serial(0, plan.panels) as panel:
            channel = T.Bind(panel * output.columns)
            b = PanelOfB(partial(keys.value, panel, channel), prepare)
            kernel.multiply_panels(output, depth, a, b, Sums(totals), chunk)
            self.work.add(q, totals, factor, channel)

"""Emits the passage of a block of queries past a block of keys: scores, softmax and results in a strip [keys, queries].

Both schedules that pack keys and values are made of it. They differ in who packs them, and in how they lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import ceil_div, chunk_length, registers, tail_extent
from harness.compiler.schedules.common.kernel_info import ATTENTION, KernelInfo
from harness.compiler.schedules.cpu.attention.online_softmax import State, exponentials_of, fill
from harness.compiler.schedules.cpu.attention.operands import Attention, Buffers
from harness.compiler.schedules.cpu.attention.packing import Rows, pack_channels
from harness.compiler.schedules.cpu.attention.score_mod import Head, Position
from harness.compiler.schedules.cpu.emit import TileSink, multiply, multiply_panels
from harness.compiler.schedules.cpu.tile import Tile

_Score = Callable[[int, T.Index], T.Expr]
"""Takes row and column of a tile of scores, and returns the product."""


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
        return self.attention.arithmetic.tiles is not None

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
        depth, tiles = self.attention.depth, self.attention.arithmetic.tiles
        return chunk_length(depth) if tiles is None else tiles.chunk(depth, even=True)

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
        scores, output = self.scores, self.output
        tile = {
            "score rows": scores.rows,
            "score columns": scores.columns,
            "rows": output.rows,
            "columns": output.columns,
        }
        return replace(self.attention.info(ATTENTION, decisions), tile=tile)


@dataclass(frozen=True)
class Work:
    """The buffers of blocks of queries.

    Attributes:
        queries: The queries, transposed: [block, element of the depth, query].
        state: State of the softmax of each block.
        mods: The buffers that score changes read, by role.
    """

    queries: T.Buffer
    state: State
    mods: Buffers


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
        arithmetic, columns = plan.attention.arithmetic, plan.columns
        scores = T.alloc_buffer((keys, columns), "float32")
        elements = (keys // arithmetic.terms, columns)
        weights = scores if arithmetic.terms == 1 else T.alloc_buffer(elements, arithmetic.dtype)
        tiles = plan.panels if plan.by_channel else columns // plan.output.rows
        return cls(scores, weights, T.alloc_buffer((tiles, plan.output.size), "float32"))

    def pad(self, first: T.Index, end: T.Index, lanes: int, value: float) -> None:
        """Emits one score for all lines from a first one on."""
        with T.serial(first, end) as key:
            fill(self.scores, lanes, value, key)


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


class Panel(NamedTuple):
    """A panel of the channels of values: its number, and its first channel."""

    number: T.Var
    channel: T.Var


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
        value: (panel, first element of a chunk of keys, number counted from it, channel in the panel) → element.
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
    value: Callable[[Panel, T.Index, T.Index, T.Index], T.Expr]
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


def pack_queries(plan: Plan, work: Work, rows: Rows, line: T.Buffer, block: QueryBlock, count: T.Index) -> None:
    """Emits the packing of a block of queries, transposed, through `line`."""
    arithmetic = plan.attention.arithmetic
    pack_channels(rows, line, plan.lanes, block.first, count, arithmetic)
    with T.serial(0, plan.attention.depth) as d, T.serial(0, plan.columns) as j:
        T.buffer_store(work.queries, line[j, d], [block.number, d, j])


def attend(plan: Plan, work: Work, strip: Strip, queries: QueryBlock, keys: KeyBlock) -> None:
    """Emits the passage of a block of queries past a block of keys."""
    highest, total, factor = (registers((plan.columns,)) for _ in range(3))
    work.state.read_highest(queries.number, highest)
    _store_scores(plan, work, strip, highest, queries, keys)
    work.state.rescale(queries.number, highest, factor)
    fill(total, plan.lanes, 0.0)

    def exponentials(first: T.Index, count: T.Index) -> None:
        exponentials_of(
            plan.attention, strip.scores, strip.weights, highest, total, (first, count), plan.lanes, padded=keys.padded
        )

    # Where one product takes all weights, it takes those of a chunk as soon as they are computed.
    interleaved = not keys.by_chunk and (plan.by_channel or plan.panels == 1)
    if not interleaved:
        _weigh(plan, strip, keys, exponentials)
    _add_results(plan, work, strip, (queries.number, keys), factor, exponentials if interleaved else None)
    work.state.add_sums(queries.number, total, factor)


def parts_of(length: T.Index, part: int) -> T.Index:
    """Emits ⌈length / part⌉ of a positive length; TVM's code generation fails on `//` of one that it counts itself."""
    return ceil_div(length, part) if isinstance(length, int) else T.Bind(T.truncdiv(length + (part - 1), part))


def _store_scores(plan: Plan, work: Work, strip: Strip, highest: T.Buffer, queries: QueryBlock, keys: KeyBlock) -> None:
    """Emits the scores of a block of queries and keys, and raises the highest of each query to them."""
    tile, arithmetic = plan.scores, plan.attention.arithmetic
    full = isinstance(keys.count, int) and keys.count % tile.rows == 0

    def query(first: T.Index, k: T.Index, j: T.Index) -> T.Expr:
        return work.queries[queries.number, first + k, j]

    def finish(p: T.Index, score: _Score) -> None:
        for i in range(tile.rows):
            key = p * tile.rows + i
            with _where(None if full else key < keys.count):
                _store_line(plan, work, strip, highest, (queries, keys), T.Bind(key), partial(score, i))

    tiles = parts_of(keys.count, tile.rows)
    if not (keys.by_chunk and plan.chunk < plan.attention.depth):
        with T.serial(0, tiles) as p:
            finish(p, _tile_of_scores(plan, partial(keys.key, p), query))
        return
    multiply_panels(
        tile,
        plan.attention.depth,
        tiles,
        keys.key,
        query,
        strip.scores,
        place=lambda p, i, j: (p * tile.rows + i, j),
        longest=plan.chunk,
        after=TileSink(lambda p, k, count: None, lambda p: finish(p, lambda i, j: strip.scores[p * tile.rows + i, j])),
        arithmetic=arithmetic,
    )


@contextmanager
def _where(condition: T.Operand | None) -> Iterator[None]:
    """Emits the code in the context for the case that a condition holds, or in any case if there is none."""
    if condition is None:
        yield
        return
    with T.If(condition), T.Then():
        yield


def _tile_of_scores(
    plan: Plan,
    key: Callable[[T.Index, T.Index, int], T.Expr],
    query: Callable[[T.Index, T.Index, T.Index], T.Expr],
) -> _Score:
    """Emits the products of one tile of keys with a block of queries; returns (row, column) → product."""
    tile, depth, arithmetic = plan.scores, plan.attention.depth, plan.attention.arithmetic
    if arithmetic.tiles is None and plan.chunk >= depth:
        rows = multiply(tile, depth, partial(key, 0), partial(query, 0), arithmetic=arithmetic)
        return lambda i, j: rows[i][j]
    totals = T.alloc_buffer((1, tile.size), "float32")
    multiply_panels(
        tile,
        depth,
        1,
        lambda p, first, k, i: key(first, k, i),
        query,
        totals,
        longest=plan.chunk,
        arithmetic=arithmetic,
        stride=depth,
    )
    return lambda i, j: totals[0, i * tile.columns + j]


def _store_line(
    plan: Plan,
    work: Work,
    strip: Strip,
    highest: T.Buffer,
    blocks: tuple[QueryBlock, KeyBlock],
    key: T.Var,
    score: Callable[[T.Index], T.Expr],
) -> None:
    """Emits the scores of one key, with all changes; `score` takes a query's number in the block."""
    queries, keys = blocks
    length = plan.attention.problem.queries
    for start in range(0, plan.columns, plan.lanes):
        with T.vectorized(0, plan.lanes) as lane:
            j = start + lane
            query = T.min(queries.first + j, length - 1) if length % plan.columns else queries.first + j
            position = Position(*queries.head, query, keys.first + key, queries.number, j)
            T.buffer_store(strip.scores, plan.attention.modified(work.mods, position, score(j)), [key, j])
            T.buffer_store(highest, T.max(highest[j], strip.scores[key, j]), [j])


def _weigh(plan: Plan, strip: Strip, keys: KeyBlock, exponentials: Callable[[T.Index, T.Index], None]) -> None:
    """Emits the exponentials of all chunks; weights of keys that do not exist become zero."""
    end = keys.chunks * (keys.chunk * plan.attention.arithmetic.terms)
    ends_early = not isinstance(keys.count, int)
    if ends_early and keys.padded:
        strip.pad(keys.count, end, plan.lanes, -math.inf)
    with T.serial(0, keys.chunks) as c:
        first = c * keys.chunk
        exponentials(first, keys.elements_from(first))
    if ends_early and not keys.padded:
        strip.pad(keys.count, end, plan.lanes, 0.0)


def _add_results(
    plan: Plan,
    work: Work,
    strip: Strip,
    place: tuple[T.Index, KeyBlock],
    factor: T.Buffer,
    before: Callable[[T.Index, T.Index], None] | None,
) -> None:
    """Emits results = factor · results + weights · values, after `before` of each chunk where that is given."""
    (q, keys), output, columns = place, plan.output, plan.columns
    arithmetic = plan.attention.arithmetic

    def weight(first: T.Index, k: T.Index, j: T.Index) -> T.Expr:
        return strip.weights[first + k, j]

    if plan.by_channel:
        multiply_panels(
            output,
            keys.depth,
            plan.panels,
            lambda p, first, k, i: keys.value(Panel(p, p * output.rows), first, k, i),
            weight,
            strip.totals,
            before=before,
            longest=keys.chunk,
            arithmetic=arithmetic,
            stride=keys.stride,
        )
        work.state.add_by_channel(q, output, strip.totals, factor)
        return
    with T.serial(0, plan.panels) as number:
        panel = Panel(number, T.Bind(number * output.columns))
        multiply_panels(
            output,
            keys.depth,
            columns // output.rows,
            lambda p, first, k, i: weight(first, k, p * output.rows + i),
            partial(keys.value, panel),
            strip.totals,
            before=before,
            longest=keys.chunk,
            arithmetic=arithmetic,
        )
        work.state.add(q, output, strip.totals, factor, panel.channel)

"""Builds attention of few queries (split-K): every key and value is read once, in place, and nothing is packed.

The strip of `block.py` is as wide as a vector of queries; with one query nearly all of that is padding, and copying
a head's keys costs more than their products. Here vectors run along channels, or along keys:

    strip[query, key] = Σ_c query[query, c] · key[key, c]        vectors of channels, whose lanes are added up in halves
    strip = exp(strip - maximum),  sum = Σ_key strip             vectors of keys
    result[query, c] = Σ_key strip[query, key] · value[key, c]   vectors of channels

A task takes a part of the keys of one head and leaves its maximum, its sum and its undivided result. The parts of a
head are put together afterwards: each is scaled by exp(its maximum - the largest one), which is 1 for one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from itertools import chain
from operator import add

from tvm import ir

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import (
    ceil_div,
    chunk_length,
    fp32,
    prim_func,
    registers,
    tail_extent,
    variable,
)
from harness.compiler.schedules.common.kernel_info import FEW_QUERIES
from harness.compiler.schedules.cpu import math as elementary
from harness.compiler.schedules.cpu.attention.operands import Attention
from harness.compiler.schedules.cpu.attention.packing import Rows
from harness.compiler.schedules.cpu.attention.score_mod import Buffers, Head, Position, finite
from harness.compiler.schedules.cpu.emit import fill

_LEAST_SUMS, _MOST_SUMS = 8, 16
"""Vectors of sums side by side: so many hide the latency of a multiply-add, so many fit the registers."""

_Sums = list[list[T.Buffer]]
"""Sums of values of some queries, several for each: [number, query][channel]."""
_Element = Callable[[T.Index, int, T.Var], T.Expr]
"""Takes a row, the first channel of a vector and a lane, and returns an element."""


def few_queries_kernel(attention: Attention, lanes: int, most_parts: int) -> T.PrimFunc:
    """Builds the kernel.

    Args:
        attention: The operands.
        lanes: fp32 numbers in a vector; channels of keys and of values are whole vectors.
        most_parts: Parts of the keys of a head, as far as they are whole chunks.
    """
    problem = attention.problem
    # A chunk of a sum is a whole number of vectors of keys.
    chunk = ceil_div(chunk_length(problem.static_keys), lanes) * lanes
    per_part = ceil_div(ceil_div(problem.static_keys, chunk), most_parts) * chunk
    parts = ceil_div(problem.static_keys, per_part)

    def body(*buffers: T.Buffer) -> None:
        *inputs, result = buffers
        shape = (problem.batch * problem.heads, problem.queries, parts)
        highest, sums = (T.alloc_buffer(shape, "float32") for _ in range(2))
        results = T.alloc_buffer((*shape, problem.width), "float32")
        sources = attention.by_role(inputs)
        kernel = _Kernel(attention, sources, lanes, chunk, per_part, highest, sums, results)
        with T.parallel(0, shape[0] * parts) as task:
            kernel.compute(task)
        with T.serial(0, shape[0]) as m, T.serial(0, problem.queries) as row:
            kernel.join_parts(m, row, result)

    return prim_func("attention", attention.arguments, body, attention.info(FEW_QUERIES, {"parts": parts}))


@dataclass(frozen=True)
class _Kernel:
    """A kernel that is being built.

    Attributes:
        attention: The operands.
        sources: The buffers of the inputs.
        lanes: fp32 numbers in a vector.
        chunk: Keys that one register adds up.
        keys: Keys of a part, whole chunks.
        highest: The highest score of each part, [head, query, part].
        sums: The sum of its exponentials.
        results: Exponentials times values, [head, query, part, channel].
    """

    attention: Attention
    sources: Buffers
    lanes: int
    chunk: int
    keys: int
    highest: T.Buffer
    sums: T.Buffer
    results: T.Buffer

    @property
    def parts(self) -> int:
        """Returns the number of parts of the keys of a head."""
        return int(self.highest.shape[2])

    def compute(self, task: T.Var) -> None:
        """Emits the work of a task: scores, softmax and result of a part of the keys of a head."""
        problem, lanes, chunk = self.attention.problem, self.lanes, self.chunk
        queries = range(problem.queries)
        m, part = T.Bind(task // self.parts), T.Bind(task % self.parts)
        head = T.Bind(m // problem.heads), T.Bind(m % problem.heads)
        begin = T.Bind(part * self.keys)
        count = tail_extent(self.keys, problem.static_keys, begin)
        count = count if isinstance(count, int) else T.Bind(count)
        strip = self._scores(head, begin, count)
        vectors = T.Bind((count + lanes - 1) // lanes)
        with T.serial(count, vectors * lanes) as k:
            for i in queries:
                T.buffer_store(strip, fp32(-math.inf), [i, k])
        top = [_highest(strip, i, vectors, lanes) for i in queries]
        for i in queries:
            T.buffer_store(self.highest, top[i][0], [m, i, part])
            T.buffer_store(top[i], finite(top[i][0]), [0])

        def clear(i: int, c: int, j: T.Var) -> None:
            T.buffer_store(self.results, fp32(0.0), [m, i, part, c + j])

        _emit_vectors(problem.queries, problem.width, lanes, clear)
        total = T.alloc_buffer((problem.queries, lanes), "float32")
        for i in queries:
            fill(total, lanes, 0.0, i)
        value = _reader(self.attention.value_rows(self.sources, head), lanes)
        with T.serial(0, (count + chunk - 1) // chunk) as c:
            first = T.Bind(c * chunk)
            keys = chunk if isinstance(count, int) else T.Bind(T.min(chunk, count - first))
            for i in queries:
                _exponentials(strip, i, first, (keys + lanes - 1) // lanes, lanes, top[i], total)
            self._add_values(strip, (first, keys), lambda k: partial(value, T.Bind(begin + k)), (m, part))
        for i in queries:
            T.buffer_store(self.sums, _folded(total, i, lanes, lambda x, y: x + y)[0], [m, i, part])

    def _scores(self, head: Head, begin: T.Expr, count: T.Index) -> T.Buffer:
        """Emits the scores of all queries and `count` keys from a first one on; returns them, [query, key]."""
        attention, sources, lanes = self.attention, self.sources, self.lanes
        queries, channels = attention.problem.queries, attention.problem.channels
        scaled = T.alloc_buffer((queries, channels), "float32")
        strip = T.alloc_buffer((queries, self.keys), "float32")
        query = _reader(attention.query_rows(sources, head), lanes)
        key = _reader(attention.key_rows(sources, head, begin, count, self.keys), lanes)
        _emit_vectors(queries, channels, lanes, lambda i, c, j: T.buffer_store(scaled, query(i, c, j), [i, c + j]))
        with T.serial(0, count) as k:
            index = T.Bind(begin + k)
            for i, product in enumerate(_products(scaled, lanes, partial(key, index))):
                T.buffer_store(strip, attention.modified(sources, Position(*head, i, index), product), [i, k])
        return strip

    def _add_values(
        self,
        strip: T.Buffer,
        keys: tuple[T.Expr, T.Index],
        value: Callable[[T.Expr], Callable[[int, T.Var], T.Expr]],
        place: tuple[T.Expr, T.Expr],
    ) -> None:
        """Emits result += strip · value for a chunk of keys, in blocks whose sums stay in registers.

        Args:
            strip: The weights, [query, key].
            keys: The first one, and how many.
            value: Takes a key and returns a function from (first channel of a vector, lane) to an element; may emit
                common parts of its vectors.
            place: Head and part.
        """
        problem, widest = self.attention.problem, _MOST_SUMS * self.lanes
        for start in range(0, problem.width, widest):
            columns = min(problem.width - start, widest)
            count = max(1, widest // columns)
            for top in range(0, problem.queries, count):
                rows = range(top, min(top + count, problem.queries))
                sums = _sums_of_values(strip, rows, (start, columns), self.lanes, keys, value)
                self._add_sums(sums, rows, (start, columns), place)

    def _add_sums(self, sums: _Sums, rows: range, channels: tuple[int, int], place: tuple[T.Expr, T.Expr]) -> None:
        """Emits result += the sums of some queries and channels, which are added up pairwise first."""
        (start, columns), (m, part) = channels, place

        def add(n: int, c: int, j: T.Var) -> None:
            values: list[T.Expr] = [lines[n][c + j] for lines in sums]
            while len(values) > 1:
                values = [x + y for x, y in zip(values[::2], values[1::2], strict=True)]
            index = (m, rows[n], part, start + c + j)
            T.buffer_store(self.results, self.results[index] + values[0], index)

        _emit_vectors(len(rows), columns, self.lanes, add)

    def join_parts(self, m: T.Var, i: T.Var, result: T.Buffer) -> None:
        """Emits one row of the result from the parts of its keys."""
        problem, lanes, parts = self.attention.problem, self.lanes, range(self.parts)
        top, total, factors = variable(-math.inf), variable(0.0), registers((self.parts,))
        for part in parts:
            T.buffer_store(top, T.max(top[0], self.highest[m, i, part]), [0])
        T.buffer_store(top, finite(top[0]), [0])
        for part in parts:
            T.buffer_store(factors, elementary.exp_below_zero(self.highest[m, i, part] - top[0]), [part])
            T.buffer_store(total, total[0] + factors[part] * self.sums[m, i, part], [0])
        with T.serial(0, problem.width // lanes) as v, T.vectorized(0, lanes) as j:
            c = v * lanes + j
            value = reduce(add, (factors[part] * self.results[m, i, part, c] for part in parts))
            head = m // problem.heads, m % problem.heads
            self.attention.store(result, value, total[0], head, i, c)


def _reader(rows: Rows, lanes: int) -> _Element:
    """Returns how vectors of channels are read, whose indices are simplified by the ranges of rows and lanes."""
    analyzer, element = rows.reader()

    def read(row: T.Index, start: int, lane: T.Var) -> T.Expr:
        if isinstance(row, T.Var):
            analyzer.bind(row, ir.Range(0, rows.length))
        analyzer.bind(lane, ir.Range(0, lanes))
        return element(row, start + lane)

    return read


def _emit_vectors(rows: int, columns: int, lanes: int, body: Callable[[int, int, T.Var], None]) -> None:
    """Emits `body(row, first column of a vector, lane)` in vectors along the columns, unrolled."""
    for i in range(rows):
        for start in range(0, columns, lanes):
            with T.vectorized(0, lanes) as j:
                body(i, start, j)


def _folded(buffer: T.Buffer, row: int, lanes: int, operation: Callable[[T.Expr, T.Expr], T.Expr]) -> T.Buffer:
    """Emits the reduction of a row's lanes, half with half; returns a buffer of one element."""
    while lanes > 2:
        lanes //= 2
        half = registers((1, lanes))
        with T.vectorized(0, lanes) as j:
            T.buffer_store(half, operation(buffer[row, j], buffer[row, j + lanes]), [0, j])
        buffer, row = half, 0
    return variable(operation(buffer[row, 0], buffer[row, 1]))


def _products(scaled: T.Buffer, lanes: int, key: Callable[[int, T.Var], T.Expr]) -> list[T.TensorLoad]:
    """Emits the products of all queries with one key; returns them as elements of registers."""
    queries, channels = (int(extent) for extent in scaled.shape)
    loaded = registers((channels,))
    _emit_vectors(1, channels, lanes, lambda _, start, j: T.buffer_store(loaded, key(start, j), [start + j]))
    products = []
    for i in range(queries):
        lane_sums = registers((1, lanes))
        for start in range(0, channels, lanes):
            with T.vectorized(0, lanes) as j:
                term = scaled[i, start + j] * loaded[start + j]
                T.buffer_store(lane_sums, lane_sums[0, j] + term if start else term, [0, j])
        products.append(_folded(lane_sums, 0, lanes, lambda x, y: x + y)[0])
    return products


def _highest(strip: T.Buffer, row: int, vectors: T.Expr, lanes: int) -> T.Buffer:
    """Emits the maximum of a row of the strip; returns a buffer of one element."""
    highest = registers((1, lanes))
    fill(highest, lanes, -math.inf, 0)
    with T.serial(0, vectors) as v, T.vectorized(0, lanes) as j:
        T.buffer_store(highest, T.max(highest[0, j], strip[row, v * lanes + j]), [0, j])
    return _folded(highest, 0, lanes, T.max)


def _exponentials(
    strip: T.Buffer, row: int, first: T.Expr, vectors: T.Index, lanes: int, top: T.Buffer, total: T.Buffer
) -> None:
    """Emits strip = exp(strip - top) for a chunk of a row, and adds its sum to the lanes of the row's total."""
    added = registers((lanes,))
    fill(added, lanes, 0.0)
    with T.serial(0, vectors) as v, T.vectorized(0, lanes) as j:
        index = (row, first + v * lanes + j)
        T.buffer_store(strip, elementary.exp_below_zero(strip[index] - top[0]), index)
        T.buffer_store(added, added[j] + strip[index], [j])
    with T.vectorized(0, lanes) as j:
        T.buffer_store(total, total[row, j] + added[j], [row, j])


def _sums_of_values(
    strip: T.Buffer,
    rows: range,
    channels: tuple[int, int],
    lanes: int,
    keys: tuple[T.Expr, T.Index],
    value: Callable[[T.Expr], Callable[[int, T.Var], T.Expr]],
) -> _Sums:
    """Emits the sums of weighted values of some queries and channels, which stay in registers; returns them."""
    (start, columns), (first, count) = channels, keys
    vectors = len(rows) * columns // lanes
    # As many keys at a time as it takes to have enough sums; a chunk is a multiple of it, the last one may not be.
    group = next(n for n in (1, 2, 4) if n * vectors >= _LEAST_SUMS or n == 4)
    sums = [[registers((columns,)) for _ in rows] for _ in range(group)]

    def add(n: int, k: T.Expr) -> None:
        element = value(k)
        for c in range(0, columns, lanes):
            for row, total in zip(rows, sums[n], strict=True):
                with T.vectorized(0, lanes) as j:
                    T.buffer_store(total, total[c + j] + strip[row, k] * element(start + c, j), [c + j])

    for total in chain(*sums):
        for c in range(0, columns, lanes):
            with T.vectorized(0, lanes) as j:
                T.buffer_store(total, fp32(0.0), [c + j])
    with T.serial(0, count // group) as step:
        for n in range(group):
            add(n, first + step * group + n)
    if not isinstance(count, int) and group > 1:
        with T.serial(count // group * group, count) as k:
            add(0, first + k)
    return sums

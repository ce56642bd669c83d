"""Builds attention of few queries (split-K): every key and value is read once, in place, and nothing is packed.

The strip of `attention.py` is as wide as a vector of queries; with one query nearly all of that is padding, and copying
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
from dataclasses import replace
from functools import partial
from typing import Any

from tvm import ir, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, Reader
from harness.compiler.schedules.common.kernel import ceil_div, chunk_length, fp32, prim_func, registers
from harness.compiler.schedules.common.kernel_info import FEW_QUERIES
from harness.compiler.schedules.cpu import math as elementary
from harness.compiler.schedules.cpu.attention_operands import Attention

_LEAST_SUMS, _MOST_SUMS = 8, 16
"""Vectors of sums side by side: so many hide the latency of a multiply-add, so many fit the registers."""


def few_queries_kernel(attention: Attention, lanes: int, parts: int) -> T.PrimFunc:
    """Builds the kernel.

    Args:
        attention: The operands; channels of keys and of values are whole vectors.
        lanes: fp32 numbers in a vector.
        parts: Parts of the keys of a head.
    """
    batch, queries, heads, channels = attention.query.shape
    count, width = attention.key.shape[1], attention.value.shape[3]
    # A chunk of a sum is a whole number of vectors of keys.
    chunk = ceil_div(chunk_length(count), lanes) * lanes
    per_part = ceil_div(ceil_div(count, chunk), parts) * chunk
    parts = ceil_div(count, per_part)

    def body(*buffers: T.Buffer) -> None:
        *inputs, result = buffers
        (query, key, value), bias = attention.split(inputs)
        highest, sums = (T.alloc_buffer((batch * heads, queries, parts), "float32") for _ in range(2))
        results = T.alloc_buffer((batch * heads, queries, parts, width), "float32")
        with T.parallel(0, batch * heads * parts) as task:
            m, part = T.Bind(task // parts), T.Bind(task % parts)
            b, h = T.Bind(m // heads), T.Bind(m % heads)
            begin = T.Bind(part * per_part)
            key_count = per_part if count % per_part == 0 else T.Bind(T.min(per_part, count - begin))
            scaled = T.alloc_buffer((queries, channels), "float32")
            strip = T.alloc_buffer((queries, per_part), "float32")
            query_at, key_at, value_at = (
                _reader(operand, source, b, h, lanes)
                for operand, source in zip(attention.operands, (query, key, value), strict=True)
            )

            def scale(i: int, start: int, j: Any) -> None:
                T.buffer_store(scaled, query_at(i, start, j) * fp32(attention.scale), [i, start + j])

            _emit_vectors(queries, channels, lanes, scale)
            with T.serial(0, key_count) as k:
                index = T.Bind(begin + k)
                products = _products(queries, channels, lanes, scaled, lambda start, j: key_at(index, start, j))
                for i, product in enumerate(products):
                    T.buffer_store(strip, attention.masked(bias, (b, h, i, index), product), [i, k])
            vectors = T.Bind((key_count + lanes - 1) // lanes)
            with T.serial(key_count, vectors * lanes) as k:
                for i in range(queries):
                    T.buffer_store(strip, fp32(-math.inf), [i, k])
            top = [_highest(strip, i, vectors, lanes) for i in range(queries)]
            for i in range(queries):
                T.buffer_store(highest, top[i][0], [m, i, part])
                # Without this exp(-inf - -inf) would be NaN where every key is masked.
                T.buffer_store(top[i], T.Select(T.EQ(top[i][0], fp32(-math.inf)), fp32(0.0), top[i][0]), [0])
            _emit_vectors(
                queries, width, lanes, lambda i, start, j: T.buffer_store(results, fp32(0.0), [m, i, part, start + j])
            )
            total = T.alloc_buffer((queries, lanes), "float32")
            _emit_vectors(queries, lanes, lanes, lambda i, _, j: T.buffer_store(total, fp32(0.0), [i, j]))
            with T.serial(0, (key_count + chunk - 1) // chunk) as c:
                first = T.Bind(c * chunk)
                keys = chunk if isinstance(key_count, int) else T.Bind(T.min(chunk, key_count - first))
                for i in range(queries):
                    _exponentials(strip, i, first, (keys + lanes - 1) // lanes, lanes, top[i], total)
                _values(
                    strip,
                    queries,
                    width,
                    lanes,
                    (first, keys),
                    lambda k: partial(value_at, T.Bind(begin + k)),
                    lambda i, channel: (results, [m, i, part, channel]),
                )
            for i in range(queries):
                T.buffer_store(sums, _folded(total, i, lanes, lambda x, y: x + y)[0], [m, i, part])
        with T.serial(0, batch * heads) as m, T.serial(0, queries) as row:
            _put_together(attention, (m // heads, row, m % heads), lanes, highest, sums, results, result)

    info = attention.info(FEW_QUERIES)
    info = replace(info, decisions={**info.decisions, "parts": parts})
    return prim_func("attention", attention.arguments, body, info)


def _reader(operand: Folded, source: Any, b: Any, h: Any, lanes: int) -> Callable[[Any, int, Any], Any]:
    """Returns (row, first channel of a vector, lane) → element of one head."""
    analyzer = sym.Analyzer()
    analyzer.bind(b, ir.Range(0, operand.shape[0]))
    analyzer.bind(h, ir.Range(0, operand.shape[2]))

    def read(row: Any, start: int, lane: Any) -> Any:
        if isinstance(row, T.Var):
            analyzer.bind(row, ir.Range(0, operand.shape[1]))
        analyzer.bind(lane, ir.Range(0, lanes))
        return operand.element(Reader(source, analyzer), [b, row, h, start + lane])

    return read


def _emit_vectors(rows: int, columns: int, lanes: int, body: Callable[[int, int, Any], None]) -> None:
    """Emits `body(row, first column of a vector, lane)` in vectors along the columns, unrolled."""
    for i in range(rows):
        for start in range(0, columns, lanes):
            with T.vectorized(0, lanes) as j:
                body(i, start, j)


def _clear(line: T.Buffer, lanes: int) -> None:
    """Emits zeros for all of a line of registers."""
    _emit_vectors(1, int(line.shape[0]), lanes, lambda _, start, j: T.buffer_store(line, fp32(0.0), [start + j]))


def _folded(buffer: T.Buffer, row: int, lanes: int, operation: Callable[[Any, Any], Any]) -> T.Buffer:
    """Emits the reduction of a row's lanes, half with half; returns a buffer of one element."""
    while lanes > 2:
        lanes //= 2
        half = registers((1, lanes))
        with T.vectorized(0, lanes) as j:
            T.buffer_store(half, operation(buffer[row, j], buffer[row, j + lanes]), [0, j])
        buffer, row = half, 0
    result = registers((1,))
    T.buffer_store(result, operation(buffer[row, 0], buffer[row, 1]), [0])
    return result


def _products(
    queries: int, channels: int, lanes: int, scaled: T.Buffer, key: Callable[[int, Any], Any]
) -> list[T.TensorLoad]:
    """Emits the products of all queries with one key; returns them as elements of registers."""
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


def _highest(strip: T.Buffer, row: int, vectors: Any, lanes: int) -> T.Buffer:
    """Emits the maximum of a row of the strip; returns a buffer of one element."""
    highest = registers((1, lanes))
    _emit_vectors(1, lanes, lanes, lambda _i, _, j: T.buffer_store(highest, fp32(-math.inf), [0, j]))
    with T.serial(0, vectors) as v, T.vectorized(0, lanes) as j:
        T.buffer_store(highest, T.max(highest[0, j], strip[row, v * lanes + j]), [0, j])
    return _folded(highest, 0, lanes, T.max)


def _exponentials(
    strip: T.Buffer, row: int, first: Any, vectors: Any, lanes: int, top: T.Buffer, total: T.Buffer
) -> None:
    """Emits strip = exp(strip - top) for a chunk of a row, and adds its sum to the lanes of the row's total."""
    added = registers((lanes,))
    _clear(added, lanes)
    with T.serial(0, vectors) as v, T.vectorized(0, lanes) as j:
        index = (row, first + v * lanes + j)
        T.buffer_store(strip, elementary.exp_below_zero(strip[index] - top[0]), list(index))
        T.buffer_store(added, added[j] + strip[index], [j])
    _emit_vectors(1, lanes, lanes, lambda _i, _, j: T.buffer_store(total, total[row, j] + added[j], [row, j]))


def _values(
    strip: T.Buffer,
    queries: int,
    width: int,
    lanes: int,
    keys: tuple[Any, Any],
    value: Callable[[Any], Callable[[int, Any], Any]],
    place: Callable[[int, Any], tuple[T.Buffer, list[Any]]],
) -> None:
    """Emits result += strip · value for a chunk of keys.

    Args:
        strip: The weights, [query, key].
        queries: Rows of the result.
        width: Channels of the result.
        lanes: fp32 numbers in a vector.
        keys: The first one, and how many.
        value: Takes a key and returns a function from (first channel of a vector, lane) to an element; may emit common
            parts of its vectors.
        place: (query, channel) → the buffer with the results, and where in it.
    """
    first, count = keys
    for start in range(0, width, _MOST_SUMS * lanes):
        columns = min(width - start, _MOST_SUMS * lanes)
        rows = max(1, _MOST_SUMS * lanes // columns)
        for top in range(0, queries, rows):
            queries_of_block = range(top, min(top + rows, queries))
            _block_of_values(strip, queries_of_block, (start, columns), lanes, first, count, value, place)


def _block_of_values(
    strip: T.Buffer,
    rows: range,
    channels: tuple[int, int],
    lanes: int,
    first: Any,
    count: Any,
    value: Callable[[Any], Callable[[int, Any], Any]],
    place: Callable[[int, Any], tuple[T.Buffer, list[Any]]],
) -> None:
    """Emits the part of `_values` whose sums stay in registers."""
    start, columns = channels
    vectors = len(rows) * columns // lanes
    # As many keys at a time as it takes to have enough sums; a chunk is a multiple of it, the last one may not be.
    group = next(n for n in (1, 2, 4) if n * vectors >= _LEAST_SUMS or n == 4)
    sums = [[registers((columns,)) for _ in rows] for _ in range(group)]

    def add(n: int, k: Any) -> None:
        element = value(k)
        for c in range(0, columns, lanes):
            for row, total in zip(rows, sums[n], strict=True):
                with T.vectorized(0, lanes) as j:
                    T.buffer_store(total, total[c + j] + strip[row, k] * element(start + c, j), [c + j])

    for line in sums:
        for total in line:
            _clear(total, lanes)
    with T.serial(0, count // group) as step:
        for n in range(group):
            add(n, first + step * group + n)
    if not isinstance(count, int) and group > 1:
        with T.serial(count // group * group, count) as k:
            add(0, first + k)
    for row, *parts in zip(rows, *sums, strict=True):
        for c in range(0, columns, lanes):
            with T.vectorized(0, lanes) as j:
                values = [part[c + j] for part in parts]
                while len(values) > 1:
                    values = [x + y for x, y in zip(values[::2], values[1::2], strict=True)]
                buffer, index = place(row, start + c + j)
                T.buffer_store(buffer, buffer[tuple(index)] + values[0], index)


def _put_together(
    attention: Attention,
    place: tuple[Any, Any, Any],
    lanes: int,
    highest: T.Buffer,
    sums: T.Buffer,
    results: T.Buffer,
    result: T.Buffer,
) -> None:
    """Emits one row of the result from the parts of its keys."""
    b, i, h = place
    heads, width, parts = attention.query.shape[2], attention.value.shape[3], int(sums.shape[2])
    m = b * heads + h
    top, total, factors = registers((1,)), registers((1,)), registers((parts,))
    T.buffer_store(top, fp32(-math.inf), [0])
    T.buffer_store(total, fp32(0.0), [0])
    for part in range(parts):
        T.buffer_store(top, T.max(top[0], highest[m, i, part]), [0])
    T.buffer_store(top, T.Select(T.EQ(top[0], fp32(-math.inf)), fp32(0.0), top[0]), [0])
    for part in range(parts):
        T.buffer_store(factors, elementary.exp_below_zero(highest[m, i, part] - top[0]), [part])
        T.buffer_store(total, total[0] + factors[part] * sums[m, i, part], [0])
    with T.serial(0, width // lanes) as v, T.vectorized(0, lanes) as j:
        c = v * lanes + j
        value: Any = factors[0] * results[m, i, 0, c]
        for part in range(1, parts):
            value = value + factors[part] * results[m, i, part, c]
        value = T.Select(T.EQ(total[0], fp32(0.0)), fp32(0.0), value / total[0])
        attention.store(result, value, (b, i, h, c))

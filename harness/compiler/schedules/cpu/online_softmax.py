"""Provides the online softmax of attention kernels, whose state continues from one block of keys to the next.

Scores are kept transposed, [key, query], so that everything that happens per query is vectorized over queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, sym

from harness.compiler import tir as T
from harness.compiler.schedules.common.folding import Folded, Reader
from harness.compiler.schedules.common.kernel import fp32, registers
from harness.compiler.schedules.cpu import math as elementary
from harness.compiler.schedules.cpu.attention_operands import Attention
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.tile import Tile


@dataclass(frozen=True)
class State:
    """The state of queries of some blocks after some keys: the softmax of these keys, not yet divided by its sum.

    Attributes:
        highest: Its highest score, [block, query].
        sums: The sum of its exponentials.
        results: Exponentials times values, [block, query, channel].
        by_channel: Whether these are [block, channel, query] instead.
    """

    highest: T.Buffer
    sums: T.Buffer
    results: T.Buffer
    by_channel: bool = False

    def clear(self, q: Any, lanes: int) -> None:
        """Emits the state before the first key."""
        columns = int(self.highest.shape[1])
        for_each_vector(columns, lanes, lambda j: T.buffer_store(self.highest, fp32(-math.inf), [q, j]))
        for_each_vector(columns, lanes, lambda j: T.buffer_store(self.sums, fp32(0.0), [q, j]))
        _, outer, inner = (int(extent) for extent in self.results.shape)
        with T.serial(0, outer) as i:
            for_each_vector(inner, lanes, lambda c: T.buffer_store(self.results, fp32(0.0), [q, i, c]))

    def result(self, q: Any, i: Any, channel: Any) -> Any:
        """Returns the unfinished result of a query of a block."""
        return self.results[q, channel, i] if self.by_channel else self.results[q, i, channel]

    def read_highest(self, q: Any, highest: T.Buffer, lanes: int) -> None:
        """Emits a copy of the highest scores of a block."""
        for_each_vector(int(highest.shape[0]), lanes, lambda j: T.buffer_store(highest, self.highest[q, j], [j]))

    def rescale(self, q: Any, highest: T.Buffer, factor: T.Buffer, lanes: int) -> None:
        """Emits factor = exp(old highest - new highest), of which the new one, 0 for -inf, is left in `highest`."""

        def finite(score: Any) -> Any:
            # Without this exp(-inf - -inf) would be NaN where every key is masked.
            return T.Select(T.EQ(score, fp32(-math.inf)), fp32(0.0), score)

        def store_factor(j: Any) -> None:
            T.buffer_store(factor, elementary.exp_below_zero(self.highest[q, j] - finite(highest[j])), [j])

        def note(j: Any) -> None:
            T.buffer_store(self.highest, highest[j], [q, j])
            T.buffer_store(highest, finite(highest[j]), [j])

        # Two loops: in one, TVM 0.27 would let `factor` share the memory of the old highest, which then overwrites it.
        for_each_vector(int(highest.shape[0]), lanes, store_factor)
        for_each_vector(int(highest.shape[0]), lanes, note)

    def add(self, q: Any, tile: Tile, totals: T.Buffer, factor: T.Buffer, channel: Any) -> None:
        """Emits results = factor · results + totals for the channels of one panel."""
        with T.serial(0, int(factor.shape[0])) as i:
            weight = T.Bind(factor[i])

            def accumulate(j: Any) -> None:
                added = totals[i // tile.rows, i % tile.rows * tile.columns + j]
                index = (q, i, channel + j)
                T.buffer_store(self.results, self.results[index] * weight + added, list(index))

            for_each_vector(tile.columns, tile.lanes, accumulate)

    def add_by_channel(self, q: Any, tile: Tile, totals: T.Buffer, factor: T.Buffer) -> None:
        """Emits results = factor · results + totals, [panel of channels, channel · query], for all channels."""
        with T.serial(0, int(self.results.shape[1])) as channel:

            def accumulate(j: Any) -> None:
                added = totals[channel // tile.rows, channel % tile.rows * tile.columns + j]
                index = (q, channel, j)
                T.buffer_store(self.results, self.results[index] * factor[j] + added, list(index))

            for_each_vector(tile.columns, tile.lanes, accumulate)

    def add_sums(self, q: Any, total: T.Buffer, factor: T.Buffer, lanes: int) -> None:
        """Emits sums = factor · sums + total."""
        for_each_vector(
            int(total.shape[0]),
            lanes,
            lambda j: T.buffer_store(self.sums, self.sums[q, j] * factor[j] + total[j], [q, j]),
        )


def copy_rows(
    operand: Folded,
    buffers: Sequence[T.Buffer],
    head: tuple[Any, Any],
    target: T.Buffer,
    lanes: int,
    first: Any = 0,
    rows: Any = None,
    scale: float = 1.0,
) -> None:
    """Emits target[row, channel] = scale · operand[batch, first + row, head, channel]; zero beyond its edges."""
    batch, length, heads, channels = operand.shape
    rows = min(length, int(target.shape[0])) if rows is None else rows
    analyzer = sym.Analyzer()
    for number, extent in zip(head, (batch, heads), strict=True):
        if isinstance(number, T.Var):
            analyzer.bind(number, ir.Range(0, extent))
    pairs = channels // operand.period

    def value(index: Any, channel: Any) -> Any:
        element = operand.element(Reader(buffers, analyzer), [head[0], index, head[1], channel])
        return element if scale == 1.0 else element * fp32(scale)

    with T.serial(0, rows) as row:
        # A variable of known range: the index of an element is simplified by it.
        index = T.Bind(first + row)
        analyzer.bind(index, ir.Range(0, length))
        if operand.period == 1:
            for_each_vector(channels, lanes, lambda c: T.buffer_store(target, value(index, c), [row, c]))
        else:
            with T.serial(0, pairs) as pair:
                analyzer.bind(pair, ir.Range(0, pairs))
                for n in range(operand.period):
                    channel = pair * operand.period + n
                    T.buffer_store(target, value(index, channel), [row, channel])
        _clear(target, row, channels)
    _clear_after(target, rows)


def pack_channels(
    operand: Folded,
    buffers: Sequence[T.Buffer],
    head: tuple[Any, Any],
    target: T.Buffer,
    lanes: int,
    first: Any = 0,
    rows: Any = None,
    scale: float = 1.0,
    arithmetic: MicroKernel = FP32,
) -> None:
    """Copies rows as `copy_rows` does, into elements of an arithmetic whose terms are channels of a row."""
    if arithmetic.terms == 1:
        copy_rows(operand, buffers, head, target, lanes, first, rows, scale)
        return
    channels = int(operand.shape[3])
    depth = channels // arithmetic.terms
    rows = min(operand.shape[1], int(target.shape[0])) if rows is None else rows
    line = T.alloc_buffer((1, channels), "float32")
    with T.serial(0, rows) as row:
        copy_rows(operand, buffers, head, line, lanes, first + row, 1, scale)
        for_each_vector(
            depth,
            lanes,
            lambda k: T.buffer_store(target, arithmetic.pack(lambda c: line[0, c], k, depth), [row, k]),
        )
        _clear(target, row, depth)
    _clear_after(target, rows)


def _clear(target: T.Buffer, row: Any, first: int) -> None:
    """Emits zeros from one column of a row to its end."""
    end = int(target.shape[1])
    if first < end:
        with T.serial(first, end) as k:
            T.buffer_store(target, T.const(0, target.dtype), [row, k])


def _clear_after(target: T.Buffer, rows: Any) -> None:
    """Emits zeros in all but the first rows."""
    total = int(target.shape[0])
    if not (isinstance(rows, int) and rows == total):
        with T.serial(rows, total) as row:
            _clear(target, row, 0)


def pack_keys(
    operand: Folded,
    buffers: Sequence[T.Buffer],
    head: tuple[Any, Any],
    target: T.Buffer,
    lanes: int,
    block: int,
    arithmetic: MicroKernel = FP32,
) -> None:
    """Copies rows as `copy_rows` does, into elements of an arithmetic whose terms are consecutive keys.

    Args:
        operand: The operand to copy.
        buffers: Its buffers.
        head: Batch and head.
        target: [block, element of the block] as one row after the other, channel; where the arithmetic multiplies whole
            panels the other way round, channel by channel.
        lanes: fp32 numbers in a vector.
        block: Keys of a block, padded with zeros to its elements.
        arithmetic: The arithmetic.
    """
    terms, by_channel = arithmetic.terms, arithmetic.a.row_major
    if terms == 1:
        copy_rows(operand, buffers, head, target, lanes)
        return
    rows, padded = (int(extent) for extent in (reversed(target.shape) if by_channel else target.shape))
    blocks = operand.shape[1] // block
    elements = rows // blocks
    lines = T.alloc_buffer((terms, padded), "float32")
    with T.serial(0, blocks) as b, T.serial(0, elements) as k:
        key_count = terms if block == elements * terms else T.Bind(T.max(0, T.min(terms, block - k * terms)))
        copy_rows(operand, buffers, head, lines, lanes, b * block + k * terms, key_count)

        def store(c: Any, b: Any = b, k: Any = k) -> None:
            row = b * elements + k
            T.buffer_store(target, joined_rows(arithmetic, lines, 0, c), [c, row] if by_channel else [row, c])

        for_each_vector(padded, lanes, store)


def joined_rows(arithmetic: MicroKernel, buffer: T.Buffer, element: Any, column: Any) -> Any:
    """Returns an element whose terms are rows of a buffer that follow each other."""
    return arithmetic.join(lambda n: buffer[element * arithmetic.terms + n, column])


def exponentials_of(
    attention: Attention,
    tile: Tile,
    strip: T.Buffer,
    weights: T.Buffer,
    highest: T.Buffer,
    total: T.Buffer,
    chunk: tuple[Any, Any],
    *,
    padded: bool = False,
) -> None:
    """Emits weights[key, j] = exp(strip[key, j] - highest[j]) for a chunk of keys, and adds their sum to total[j].

    Args:
        attention: The problem.
        tile: The register tile of scores.
        strip: The scores, [key, query].
        weights: Elements of the attention's arithmetic, whose terms are keys: the strip itself where they are fp32.
        highest: The highest scores.
        total: Sums of the exponentials before rounding.
        chunk: The first element, and how many.
        padded: Whether there are scores of -inf for keys that do not exist.
    """
    (first, count), arithmetic = chunk, attention.arithmetic
    terms = arithmetic.terms
    exponential = elementary.exp_below_zero if terms == 1 else elementary.exp_below_zero_for_bf16
    partial = registers((tile.columns,))
    fill(partial, tile.columns, tile.lanes, 0.0)
    flush_subnormals = attention.masks or padded
    with T.serial(0, count) as k:
        for start in range(0, tile.columns, tile.lanes):
            exact = strip if terms == 1 else registers((terms, tile.columns))
            for n in range(terms):
                with T.vectorized(0, tile.lanes) as j:
                    score = strip[(first + k) * terms + n, start + j]
                    index = (first + k, start + j) if terms == 1 else (n, start + j)
                    term = exponential(score - highest[start + j], flush_subnormals=flush_subnormals)
                    T.buffer_store(exact, term, list(index))
                    T.buffer_store(partial, partial[start + j] + exact[index], [start + j])
            if terms > 1:
                with T.vectorized(0, tile.lanes) as j:
                    joined = joined_rows(arithmetic, exact, 0, start + j)
                    T.buffer_store(weights, joined, [first + k, start + j])
    for_each_vector(tile.columns, tile.lanes, lambda j: T.buffer_store(total, total[j] + partial[j], [j]))


def fill(buffer: T.Buffer, count: int, lanes: int, value: float) -> None:
    """Emits buffer[j] = value for j < count."""
    for_each_vector(count, lanes, lambda j: T.buffer_store(buffer, fp32(value), [j]))

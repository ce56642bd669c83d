"""What attention kernels of many queries share: the state of a softmax that goes on from one block of keys to the next.

Scores are kept transposed, [key, query], so that everything that happens per query is vectorized over queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, sym, tirx
from tvm.script.ir_builder import tirx as T

from harness.schedules.common.folding import Folded, Reader
from harness.schedules.common.kernel import fp32, registers
from harness.schedules.cpu import math as elementary
from harness.schedules.cpu.attention_operands import Attention
from harness.schedules.cpu.emit import for_each_vector
from harness.schedules.cpu.tile import Tile


@dataclass(frozen=True)
class State:
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


def copy_rows(
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


def exponentials_of(
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
    fill(partial, tile.columns, tile.lanes, 0.0)
    with T.serial(0, count) as k:
        for start in range(0, tile.columns, tile.lanes):
            with T.vectorized(0, tile.lanes) as j:
                at = (first + k, start + j)
                term = elementary.exp_below_zero(strip[at] - highest[start + j], vanishes=attention.masks)
                T.buffer_store(strip, term, list(at))
                T.buffer_store(partial, partial[start + j] + strip[at], [start + j])
    for_each_vector(tile.columns, tile.lanes, lambda j: T.buffer_store(total, total[j] + partial[j], [j]))


def fill(buffer: tirx.Buffer, count: int, lanes: int, value: float) -> None:
    """Emits buffer[j] = value for j < count."""
    for_each_vector(count, lanes, lambda j: T.buffer_store(buffer, fp32(value), [j]))

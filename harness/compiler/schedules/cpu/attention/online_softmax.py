"""Provides the online softmax of attention kernels, whose state continues from one block of keys to the next.

Scores are kept transposed, [key, query], so that everything that happens per query is vectorized over queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.compiler import tir as T
from harness.compiler.schedules.common.kernel import fp32
from harness.compiler.schedules.cpu import math as elementary
from harness.compiler.schedules.cpu.emit import for_each_vector
from harness.compiler.schedules.cpu.tile import Tile


@dataclass(frozen=True)
class State:
    """The state of queries of some blocks after some keys: the softmax of these keys, not yet divided by its sum.

    Attributes:
        highest: Its highest score, [block, query].
        sums: The sum of its exponentials.
        results: Exponentials times values, [block, query, channel].
        lanes: fp32 numbers in a vector.
        by_channel: Whether these are [block, channel, query] instead.
    """

    highest: T.Buffer
    sums: T.Buffer
    results: T.Buffer
    lanes: int
    by_channel: bool = False

    @classmethod
    def allocated(cls, blocks: int, tile: Tile, width: int, *, by_channel: bool = False) -> State:
        """Emits the allocation for blocks of so many queries as a tile of scores has, and for so many channels."""
        columns = tile.columns
        highest, sums = (T.alloc_buffer((blocks, columns), "float32") for _ in range(2))
        results = (blocks, width, columns) if by_channel else (blocks, columns, width)
        return cls(highest, sums, T.alloc_buffer(results, "float32"), tile.lanes, by_channel)

    @property
    def columns(self) -> int:
        """Returns the queries of a block."""
        return int(self.highest.shape[1])

    def clear(self, q: T.Index) -> None:
        """Emits the state before the first key."""
        fill(self.highest, self.lanes, -math.inf, q)
        fill(self.sums, self.lanes, 0.0, q)
        with T.serial(0, int(self.results.shape[1])) as i:
            fill(self.results, self.lanes, 0.0, q, i)

    def read_highest(self, q: T.Index, highest: T.Buffer) -> None:
        """Emits a copy of the highest scores of a block."""
        for_each_vector(self.columns, self.lanes, lambda j: T.buffer_store(highest, self.highest[q, j], [j]))

    def rescale(self, q: T.Index, highest: T.Buffer, factor: T.Buffer) -> None:
        """Emits factor = exp(old highest - new highest), of which the new one, 0 for -inf, is left in `highest`."""

        def store_factor(j: T.Index) -> None:
            T.buffer_store(factor, elementary.exp_below_zero(self.highest[q, j] - finite(highest[j])), [j])

        def note(j: T.Index) -> None:
            T.buffer_store(self.highest, highest[j], [q, j])
            T.buffer_store(highest, finite(highest[j]), [j])

        # Two loops: in one, TVM 0.27 would let `factor` share the memory of the old highest, which then overwrites it.
        for_each_vector(self.columns, self.lanes, store_factor)
        for_each_vector(self.columns, self.lanes, note)

    def add(self, q: T.Index, tile: Tile, totals: T.Buffer, factor: T.Buffer, channel: T.Index = 0) -> None:
        """Emits results = factor · results + totals for the channels of one panel, or for all if they come first.

        Args:
            q: Number of the block.
            tile: The register tile of the results.
            totals: [tile, row · column].
            factor: One for each query.
            channel: The first channel of the panel.
        """
        with T.serial(0, int(self.results.shape[1])) as i:
            of_query = None if self.by_channel else T.Bind(factor[i])

            def accumulate(j: T.Index) -> None:
                added = totals[i // tile.rows, i % tile.rows * tile.columns + j]
                index = (q, i, channel + j)
                weight = factor[j] if of_query is None else of_query
                T.buffer_store(self.results, self.results[index] * weight + added, index)

            for_each_vector(tile.columns, tile.lanes, accumulate)

    def add_sums(self, q: T.Index, total: T.Buffer, factor: T.Buffer) -> None:
        """Emits sums = factor · sums + total."""
        for_each_vector(
            self.columns,
            self.lanes,
            lambda j: T.buffer_store(self.sums, self.sums[q, j] * factor[j] + total[j], [q, j]),
        )


def finite(score: T.Expr) -> T.Expr:
    """Returns a highest score, and 0 for -inf: exp(-inf - -inf) would be NaN where every key is masked."""
    return T.Select(T.EQ(score, fp32(-math.inf)), fp32(0.0), score)


def normalized(value: T.Expr, weight: T.Expr) -> T.Expr:
    """Returns a sum of weighted values divided by the sum of the weights; zero if that is zero."""
    return T.Select(T.EQ(weight, fp32(0.0)), fp32(0.0), value / weight)


def fill(buffer: T.Buffer, lanes: int, value: float, *row: T.Index) -> None:
    """Emits buffer[row, j] = value for all j; a buffer of one dimension has one row, ()."""
    for_each_vector(int(buffer.shape[-1]), lanes, lambda j: T.buffer_store(buffer, fp32(value), [*row, j]))

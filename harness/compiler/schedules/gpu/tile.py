"""Chooses the tile of a product that a block of threads computes, by the product's shape alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.compiler.schedules.gpu.threads import MULTIPROCESSORS

_DEPTH = 8
"""Number of terms that a thread sums between two barriers."""


@dataclass(frozen=True)
class Tile:
    """A tile of rows × columns, shared by the threads of a block.

    Attributes:
        rows, columns: Rows and columns of the sums in a thread's registers, each 1, 2, 4 or 8.
        down, across: Threads along the rows and columns of the tile.
        split: Groups of threads that take turns in the terms.
        rate: Share of a multiprocessor's peak that it is expected to reach: a thread loads rows + columns numbers from
            shared memory for rows · columns multiplications.
    """

    rows: int
    columns: int
    down: int
    across: int
    split: int = 1
    rate: float = 1.0

    depth = _DEPTH

    @property
    def height(self) -> int:
        """Returns the number of rows of the tile."""
        return self.rows * self.down

    @property
    def width(self) -> int:
        """Returns the number of columns of the tile."""
        return self.columns * self.across

    @property
    def threads(self) -> int:
        """Returns the number of threads of a block."""
        return self.down * self.across * self.split

    @property
    def slab(self) -> int:
        """Returns the number of terms of the operands' tiles that are in shared memory at once."""
        return self.depth * self.split

    @property
    def pitches(self) -> tuple[int, int]:
        """Returns the distance of two terms in the shared tile of each operand.

        Rows and columns are the fastest dimension, because a thread reads some neighbours of one term at once; padding
        puts neighbouring terms of one row, which threads write at once, into different banks.
        """
        return self.height + min(4, self.rows), self.width + min(4, self.columns)

    @property
    def shared_bytes(self) -> int:
        """Returns a block's shared memory in bytes: a slab of both operands, and the second sums of all threads."""
        return 4 * (self.slab * sum(self.pitches) + self.rows * self.columns * self.threads)

    def blocks(self, batch: int, rows: int, columns: int) -> int:
        """Returns the number of blocks of a product."""
        return batch * math.ceil(rows / self.height) * math.ceil(columns / self.width)


_LARGE = (
    Tile(8, 8, 16, 8, rate=1.0),
    Tile(8, 8, 8, 8, rate=0.9),
    Tile(4, 4, 8, 8, split=4, rate=0.5),
)
"""The fewer numbers a thread loads for a multiplication the better; the smaller the tile, the more blocks there are."""

_FEW = 8
"""Largest number of rows or columns that every thread has all of."""


def choose_tile(batch: int, rows: int, columns: int, shared_bytes: int, threads: int) -> Tile:
    """Chooses the tile of a product.

    With few rows or columns, all of them are in each thread's tile: then memory is the limit, and many threads share
    the terms. Otherwise it is the tile with the least work for the busiest multiprocessor.

    Args:
        batch: Number of products.
        rows: Rows of each.
        columns: Columns of each.
        shared_bytes: Shared memory that a block may have.
        threads: Threads that a block may have.
    """
    few = 1 << (min(rows, columns, _FEW) - 1).bit_length()
    if min(rows, columns) <= _FEW:
        wide = batch * max(rows, columns) // 32 >= MULTIPROCESSORS
        lanes, split = (32, 8) if wide else (8, 32)
        return Tile(few, 1, 1, lanes, split) if rows <= columns else Tile(1, few, lanes, 1, split)

    def cost(tile: Tile) -> float:
        share = max(1.0, tile.blocks(batch, rows, columns) / MULTIPROCESSORS)
        return share * tile.height * tile.width / tile.rate

    return min((t for t in _LARGE if t.shared_bytes <= shared_bytes and t.threads <= threads), key=cost)

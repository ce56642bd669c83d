"""Decides the blocking of a product: its tile, its chunks, and the blocks that tasks get.

Threads get equal runs of consecutive tasks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from harness.compiler.schedules.common.kernel import ceil_div
from harness.compiler.schedules.cpu.tile import Tile

Side = Literal["left", "right"]
"""An operand of a product: A, or B."""

THREADS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of threads that work should divide well among; which ones a compiled folder gets is not known."""
LEAST_WORK = 1 << 21
"""Multiply-adds of a task at least, where there is no other reason to have more tasks: some 20 µs."""
_LEFT_PANELS = 64
"""Left panels that share one pass over the right operand; their sums, 1.5 KB each, stay in the second-level cache."""
_TASKS = 16
"""Tasks wanted at least, however small they are."""
_MOST_TASKS = 2048
"""Tasks that are enough: 64 threads get 32 each, so that one more or less is 3 %."""
_REUSE = 4
"""Left panels, if there are as many, that share a pass over the right operand: so it is read behind the arithmetic."""


@dataclass(frozen=True)
class Extents:
    """The extents of `batch` independent products of rows × depth by depth × columns: m, k and n of BLIS."""

    batch: int
    rows: int
    columns: int
    depth: int

    def width(self, side: Side) -> int:
        """Returns the rows of the left operand or the columns of the right one."""
        return self.rows if side == "left" else self.columns

    def packed(self, terms: int) -> Extents:
        """Returns the same product with a depth in elements of panels, of so many terms each."""
        return replace(self, depth=self.depth // terms)


@dataclass(frozen=True)
class Blocking:
    """The blocking of a product, with all of its decisions.

    Attributes:
        tile: The register tile, MR × NR of BLIS.
        slots: Micro-panels of the streaming operand that a task packs; with their width, the MC or NC of BLIS.
        splits: Parts of the resident operand, each for tasks of its own.
        chunk: Elements of the depth that one register adds up, the KC of BLIS.
    """

    tile: Tile
    slots: int
    splits: int
    chunk: int


def panel_width(side: Side, tile: Tile) -> int:
    """Returns the width of a packed panel on this side."""
    return tile.rows if side == "left" else tile.columns


def packed_shape(side: Side, batch: int, width: int, depth: int, tile: Tile) -> tuple[int, int, int, int]:
    """Returns the shape of a packed operand: [batch, panel, depth, width of a panel]."""
    panel = panel_width(side, tile)
    return batch, ceil_div(width, panel), depth, panel


def panels(extents: Extents, streaming: Side, tile: Tile) -> tuple[int, int]:
    """Returns the number of panels of the streaming operand, and of the resident one."""
    resident: Side = "right" if streaming == "left" else "left"
    return (
        ceil_div(extents.width(streaming), panel_width(streaming, tile)),
        ceil_div(extents.width(resident), panel_width(resident, tile)),
    )


def choose_partition(extents: Extents, streaming: Side, tile: Tile, block_bytes: int) -> tuple[int, int]:
    """Returns `slots` and `splits` of a blocking whose blocks fit the workspace and make enough tasks.

    Args:
        extents: The extents; the depth counts elements of panels.
        streaming: The operand that streams: `left` or `right`.
        tile: The register tile.
        block_bytes: Largest size of a block in bytes, where the left operand streams.
    """
    panel = panel_width(streaming, tile)
    count, others = panels(extents, streaming, tile)
    most_slots = count
    if streaming == "left":
        most_slots = min(_LEFT_PANELS, max(1, block_bytes // (4 * panel * extents.depth)))
    slots = min(most_slots, count, max(ceil_div(count * extents.batch, _TASKS), _REUSE if streaming == "left" else 1))
    blocks = ceil_div(count, slots)
    splits = max(1, min(others, ceil_div(_TASKS, extents.batch * blocks)))
    if streaming == "left":
        # More parts cost nothing: a thread packs a block once for all parts that it takes one after the other.
        of_panel = slots * panel * tile.columns * extents.depth
        least_panels = max(ceil_div(LEAST_WORK, of_panel), ceil_div(extents.batch * blocks * others, _MOST_TASKS))
        splits = max(splits, others // least_panels)
    else:
        # Nor do smaller blocks: panels are packed one by one.
        of_panel = extents.rows * panel * extents.depth
        least_panels = max(ceil_div(LEAST_WORK, of_panel), ceil_div(extents.batch * count, _MOST_TASKS))
        blocks = max(blocks, count // least_panels)
        splits = max(splits, ceil_div(others, _LEFT_PANELS))
    return ceil_div(count, blocks), ceil_div(others, ceil_div(others, splits))


def efficiency(units: int, per_task: int, times: int, threads: int) -> float:
    """Returns the share of the threads' time that is work, if units take equally long.

    Args:
        units: Units of work that are cut into tasks.
        per_task: Units of a task; the last one has the remaining units.
        times: Number of repetitions of the work; a task never has units of two repetitions.
        threads: Number of threads.
    """
    tasks = ceil_div(units, per_task)
    turns = ceil_div(times * tasks, threads)
    # Of so many tasks in a row, at least `turns // tasks` are a last one.
    longest = turns * per_task - turns // tasks * (tasks * per_task - units)
    return units * times / (threads * longest)

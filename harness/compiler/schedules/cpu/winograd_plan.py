"""Divides a convolution by minimal filtering into tasks; `winograd.py` has the kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from harness.compiler.schedules.common.kernel import ceil_div
from harness.compiler.schedules.cpu.blocking import LEAST_WORK
from harness.compiler.schedules.cpu.filtering import UPSAMPLED, Filtering, minimal_filtering
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.microkernels.microkernel import MicroKernel
from harness.compiler.schedules.cpu.tile import Tile, VectorUnit, choose_tile, loads
from harness.compiler.schedules.cpu.window import Window

_FILTERING = minimal_filtering(3, (0, 1, -1))
_LEAST_DEPTH = 32
"""Input channels and filters from which on the products outweigh the transformations."""
_THREADS = (2, 4, 8)
"""Numbers of threads that blocks of lines should keep busy by themselves."""
_MORE_THREADS = (2, 4, 8, 16, 32, 64)
"""Numbers of threads that parts of the filters should keep busy, too."""
_SPLITS = (1, 2, 4, 8)
"""Parts of the filters; in more of them products are of so few filters that they take longer on one thread."""
_PATCH_BYTES = 2560 * 1024
"""Largest size of a task's transformed patches in bytes, if it has more than one line; V is read once per group of
filters."""
_PRODUCT_BYTES = 1280 * 1024
"""Largest size of the products of a group of filters in bytes."""
_TRANSFORMING = 20
"""Cost of transforming a patch, in filters that could be multiplied with it meanwhile."""


@dataclass(frozen=True)
class Blocking:
    """The blocking of a convolution, with all of its decisions.

    Attributes:
        tile: The register tile of the products.
        lines: Lines of tiles in a block.
        splits: Parts of the filters; a thread transforms the patches of a block once for all parts that it takes.
        groups: Parts that a task's filters are done in, one after the other.
    """

    tile: Tile
    lines: int
    splits: int
    groups: int


@dataclass(frozen=True)
class Plan:
    """A convolution by minimal filtering.

    Attributes:
        window: The convolution.
        blocking: Its register tile and its tasks.
        filtering: The filtering of both axes.
        micro_kernel: The micro-kernel of the products.
    """

    window: Window
    blocking: Blocking
    filtering: Filtering = _FILTERING
    micro_kernel: MicroKernel = FP32

    @property
    def in_panels(self) -> bool:
        """Returns whether patches and products lie panel by panel, each one piece of memory; rows of vectors if not."""
        return self.micro_kernel.a.row_major

    @property
    def elements(self) -> int:
        """Returns the number of elements of the channels."""
        return self.window.channels // self.micro_kernel.terms

    @property
    def places(self) -> int:
        """Returns the number of elements of a patch, which is the number of products."""
        return self.filtering.inputs**2

    @property
    def panels(self) -> int:
        """Returns the number of panels of filters."""
        return ceil_div(self.window.filters, self.blocking.tile.rows)

    @property
    def group(self) -> int:
        """Returns the number of panels of filters that are computed at a time."""
        return ceil_div(ceil_div(self.panels, self.blocking.splits), self.blocking.groups)

    @property
    def grid(self) -> tuple[int, int]:
        """Returns the number of lines of tiles, and of tiles in a line."""
        return grid(self.window, self.filtering)

    @property
    def line(self) -> int:
        """Returns the number of tiles that a line takes in memory: whole vectors if a panel is one piece."""
        across, lanes = self.grid[1], self.blocking.tile.lanes
        return ceil_div(across, lanes) * lanes if self.in_panels else across

    @property
    def tiles(self) -> int:
        """Returns the number of tiles of a block, padded to whole panels."""
        columns = self.blocking.tile.columns
        return ceil_div(self.blocking.lines * self.line, columns) * columns

    @property
    def workspace(self) -> int:
        """Returns the size of a task's fp32 patches and products in bytes."""
        patches = self.places * self.window.channels * self.tiles
        return 4 * (patches + self.group * self.blocking.tile.rows * self.places * self.tiles)


def grid(window: Window, filtering: Filtering = _FILTERING) -> tuple[int, int]:
    """Returns the lines of tiles, and tiles in a line."""
    return ceil_div(window.result[2], filtering.outputs), ceil_div(window.result[3], filtering.outputs)


def filterable(window: Window) -> bool:
    """Returns whether this kernel takes a convolution with constant weights: dense, 3 × 3, deep enough."""
    return (
        window.kernel == (3, 3)
        and window.strides == window.dilation == (1, 1)
        and window.groups == 1
        and min(window.channels, window.filters) >= _LEAST_DEPTH
    )


def upsampled_plan(unit: VectorUnit, window: Window, micro_kernel: MicroKernel) -> Plan:
    """Returns the plan of a convolution of an image that is upsampled to twice its size, which tuning does not know.

    Args:
        unit: The target's vector registers.
        window: The convolution; its image is the one before.
        micro_kernel: The micro-kernel of the products.
    """
    tile = micro_kernel.choose_tile and micro_kernel.choose_tile(unit, window.filters, window.pixels)
    blocking = choose_blocking(unit, window, UPSAMPLED, tile, micro_kernel.term_bytes)
    return Plan(window, blocking, UPSAMPLED, micro_kernel)


def choose_blocking(
    unit: VectorUnit,
    window: Window,
    filtering: Filtering = _FILTERING,
    only: Tile | None = None,
    bytes_each: int = FP32.term_bytes,
) -> Blocking:
    """Chooses the blocks with the least work on few threads, and then the parts of the filters for many threads.

    Work is in multiply-adds of all threads, each of which is busy for as long as the one with the most tasks.

    Args:
        unit: The target's vector registers.
        window: The convolution.
        filtering: The filtering of both axes.
        only: The register tile, if there is no choice.
        bytes_each: Bytes of a channel in a place of a patch.
    """
    lines, across = grid(window, filtering)
    places = filtering.inputs**2

    def choices() -> Iterator[tuple[int, int, Tile, int]]:
        for height in range(1, lines + 1):
            if height > 1 and bytes_each * places * window.channels * height * across > _PATCH_BYTES:
                break
            for splits in _SPLITS:
                tile = only or choose_tile(unit, ceil_div(window.filters, splits), height * across)
                panels = ceil_div(window.filters, tile.rows)
                if splits <= panels:
                    yield height, splits, tile, panels

    def work(choice: tuple[int, int, Tile, int]) -> float:
        height, splits, tile, panels = choice
        blocks = ceil_div(lines, height)
        per_task = ceil_div(panels, splits) * tile.rows * ceil_div(height * across, tile.columns) * tile.columns
        tasks = window.image[0] * blocks * splits
        rounds = sum(threads * ceil_div(tasks, threads) for threads in _THREADS)
        return rounds * (per_task * loads(tile.rows, tile.vectors) + _TRANSFORMING * height * across)

    height, splits, tile, panels = min(choices(), key=work)
    splits = _more_splits(window, tile, height, splits, filtering) if splits < panels else splits
    return Blocking(tile, height, splits, choose_groups(window, tile, height, splits, filtering))


def _more_splits(window: Window, tile: Tile, height: int, splits: int, filtering: Filtering) -> int:
    """Chooses at least so many parts of the filters, whose tasks have `LEAST_WORK`, by the least work of all."""
    lines, across = grid(window, filtering)
    panels, blocks = ceil_div(window.filters, tile.rows), window.image[0] * ceil_div(lines, height)
    per_filter = filtering.inputs**2 * window.channels * height * across

    def filters_of(parts: int) -> int:
        return ceil_div(panels, parts) * tile.rows

    def work(parts: int) -> float:
        total = 0.0
        for threads in _MORE_THREADS:
            tasks = ceil_div(blocks * parts, threads)
            # Of the blocks of so many tasks in a row, the first and the last one may be others' as well.
            transformed = ceil_div(parts - math.gcd(tasks, parts) + tasks, parts)
            total += threads * (tasks * filters_of(parts) + transformed * _TRANSFORMING)
        return total

    large = [n for n in _SPLITS if splits < n <= panels and per_filter * filters_of(n) >= LEAST_WORK]
    return min([splits, *large], key=work)


def choose_groups(window: Window, tile: Tile, lines: int, splits: int, filtering: Filtering = _FILTERING) -> int:
    """Chooses the number of groups of filters whose products fit `_PRODUCT_BYTES`."""
    bytes_per_panel = 4 * filtering.inputs**2 * tile.rows * lines * grid(window, filtering)[1]
    per_split = ceil_div(ceil_div(window.filters, tile.rows), splits)
    return ceil_div(per_split, max(1, _PRODUCT_BYTES // bytes_per_panel))

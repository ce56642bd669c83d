"""The tasks that kernels are cut into divide among threads: laws of the count, and the layers of a ViT block."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.compiler.schedules.cpu.blocking import Extents, choose_partition, efficiency
from harness.compiler.schedules.cpu.microkernels.fp32 import FP32
from harness.compiler.schedules.cpu.schedule import Attention, Product, decided
from harness.compiler.schedules.cpu.tile import Tile, VectorUnit
from harness.compiler.schedules.cpu.window import Window
from harness.compiler.schedules.cpu.winograd_plan import Blocking, Plan, choose_blocking

UNITS = {
    "AVX-512": VectorUnit(lanes=16, registers=32),
    "AVX2": VectorUnit(lanes=8, registers=16),
    "NEON": VectorUnit(lanes=4, registers=32),
}
GOALS = {2: 0.99, 8: 0.95, 12: 0.9, 16: 0.95, 32: 0.9, 64: 0.9, 128: 0.75}
"""Share of the threads' time that is work, by number of threads."""


def slowest(sizes: list[int], threads: int) -> int:
    """Units of the thread that has most, if each gets ⌈tasks / threads⌉ that follow each other."""
    step = -(-len(sizes) // threads)
    return max(sum(sizes[first : first + step]) for first in range(0, len(sizes), step))


@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 20), st.integers(1, 130))
def test_efficiency_is_what_the_slowest_thread_leaves(units: int, per_task: int, times: int, threads: int) -> None:
    per_task = min(per_task, units)
    one = [min(per_task, units - first) for first in range(0, units, per_task)]
    exact = units * times / (threads * slowest(one * times, threads))
    assert efficiency(units, per_task, times, threads) == pytest.approx(exact) or (
        # A run of tasks may begin in the middle of a time, and then have one last task more.
        exact > efficiency(units, per_task, times, threads) >= exact * (1 - 1 / len(one))
    )


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shape", [(1024, 3072), (1024, 1024), (1024, 4736), (4736, 1024)])
def test_linear_layers_of_a_vit_block_divide_well(shape: tuple[int, int], unit: str) -> None:
    extents = Extents(1, 5184, shape[1], shape[0])
    schedule = decided(Product(extents, "left"), UNITS[unit], {})
    lanes = UNITS[unit].lanes
    rows, columns = -(-5184 // schedule["rows"]), -(-shape[1] // (schedule["vectors"] * lanes))
    per_block, per_split = -(-rows // schedule["blocks"]), -(-columns // schedule["splits"])
    tasks = [
        min(per_block, rows - first) * min(per_split, columns - other)
        for first in range(0, rows, per_block)
        for other in range(0, columns, per_split)
    ]
    assert len(tasks) == schedule["blocks"] * schedule["splits"]
    for threads, goal in GOALS.items():
        assert sum(tasks) / (threads * slowest(tasks, threads)) >= goal, threads


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("batch", "length"), [(9, 576), (1, 5184)])
def test_attention_of_a_vit_block_divides_well(batch: int, length: int, unit: str) -> None:
    schedule = decided(Attention(batch, 16, length, length, 64, 64), UNITS[unit], {})
    blocks = -(-length // (schedule["vectors"] * UNITS[unit].lanes))
    for threads, goal in GOALS.items():
        assert efficiency(blocks, -(-blocks // schedule["parts"]), 16 * batch, threads) >= goal, threads


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("size", "goals"), [(288, GOALS), (144, {2: 0.99, 8: 0.95, 16: 0.9, 32: 0.9, 64: 0.75})])
def test_minimal_filtering_of_the_pixel_decoder_divides_well(size: int, goals: dict[int, float], unit: str) -> None:
    """A task costs its filters and, if the block's patches are not its thread's already, what transforming takes."""
    transforming, shape = 20, (1, 256, size, size)
    plan = Plan(*_window_and_blocking(shape, UNITS[unit]))
    lines, splits = plan.grid[0], plan.blocking.splits
    per_split = -(-plan.panels // splits)
    filters = [
        min(per_split, plan.panels - first) * plan.blocking.tile.rows for first in range(0, plan.panels, per_split)
    ]
    heights = [min(plan.blocking.lines, lines - first) for first in range(0, lines, plan.blocking.lines)]
    tasks = [(block, height, count) for block, height in enumerate(heights) for count in filters]

    def work(run: list[tuple[int, int, int]]) -> int:
        return sum(h * count for _, h, count in run) + sum(h * transforming for _, h in {(b, h) for b, h, _ in run})

    for threads, goal in goals.items():
        step = -(-len(tasks) // threads)
        longest = max(work(tasks[first : first + step]) for first in range(0, len(tasks), step))
        assert work(tasks) / (threads * longest) >= goal, threads


def _window_and_blocking(image: tuple[int, ...], unit: VectorUnit) -> tuple[Window, Blocking]:
    window = Window(image, image, (3, 3), (1, 1), (1, 1), (1, 1), 1)
    return window, choose_blocking(unit, window)


def test_small_products_keep_few_tasks() -> None:
    tile = Tile(12, 32, 16)
    slots, splits = choose_partition(Extents(1, 35, 256, 256), "left", tile, FP32.block_bytes)
    assert -(-3 // slots) * splits <= 16

"""How well work divides among threads, which get equal runs of tasks that follow each other."""

from __future__ import annotations

from harness.compiler.schedules.common.kernel import ceil_div

THREADS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of threads that work should divide well among; which ones a compiled folder gets is not known."""
LEAST_WORK = 1 << 21
"""Multiply-adds of a task at least, where there is no other reason to have more tasks: some 20 µs."""


def efficiency(units: int, per_task: int, times: int, threads: int) -> float:
    """Returns the share of the threads' time that is work, if units take equally long.

    Args:
        units: Units of work that are cut into tasks.
        per_task: Units of a task; the last one has what is left.
        times: How often there is such work: tasks never have units of two of them.
        threads: How many.
    """
    tasks = ceil_div(units, per_task)
    turns = ceil_div(times * tasks, threads)
    # Of so many tasks in a row, at least `turns // tasks` are a last one.
    longest = turns * per_task - turns // tasks * (tasks * per_task - units)
    return units * times / (threads * longest)

"""The output of `tune`: whole keys in a terminal of 80 columns, the numbers beside them, and the limits of a search."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from conformance.support.tuning import record
from harness.schedules.cpu.product import Extents
from harness.schedules.cpu.schedule import Attention, Convolution, Product, TransposedConvolution, Workload
from harness.schedules.cpu.tile import VectorUnit
from harness.schedules.cpu.window import Window
from harness.tuned.database import Record, current_conditions
from harness.tuned.trials import Kind, Trial
from harness.tuning.display import Budget, describe_totals, format_duration, results_table
from harness.tuning.search import Progress, begin
from harness.tuning.tasks import Task

UNIT = VectorUnit(16, 32)
HEADERS = ("calls", "default", "tuned", "gain", "/ tuned", "trials")
"""Of the columns whose cells end where the header ends; the last column, the key, begins after them."""
HERE = current_conditions("llvm")

WORKLOADS: tuple[Workload, ...] = (
    Product(Extents(16, 5184, 4736, 1024), "left", 1, at_load=False, transposed=True),
    Product(Extents(1, 32, 1024, 1024), "left"),
    Product(Extents(1, 32, 1024, 4096), "left"),
    Product(Extents(1, 32, 4096, 1024), "left"),
    Convolution(Window((16, 1024, 1008, 1008), (16, 1024, 504, 504), (14, 14), (14, 14), (7, 7), (2, 2), 1)),
    TransposedConvolution((1, 1024, 72, 72), (1024, 512, 2, 2), at_load=False),
    Attention(1, 16, 5184, 5184, 64, 128, "float32", causal=True),
)


def progress(workload: Workload, kinds: tuple[Kind, ...], found: Record | None = None) -> Progress:
    trials = [
        Trial(workload.key, {"rows": n}, kind, HERE, 0.5, 0.75 if kind is Kind.MEASURED else float("nan"))
        for n, kind in enumerate(kinds)
    ]
    (state,) = begin([Task(workload, 1234)], UNIT, HERE, trials, [] if found is None else [found])
    return state


def rendered(states: list[Progress], width: int) -> list[list[str]]:
    """The cells of each row as they can be read in a terminal of that width."""
    output = StringIO()
    Console(file=output, width=width).print(results_table(states, Path("fixtures/tuned/llvm-znver5-2-threads")))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    head = next(n for n, line in enumerate(lines) if line.startswith("calls"))
    ends = [0]
    for name in HEADERS:
        ends.append(lines[head].index(name, ends[-1]) + len(name))
    rows: list[list[str]] = []
    for line in lines[head + 2 :]:
        cells = [line[start:end].strip() for start, end in zip(ends, [*ends[1:], None], strict=True)]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    return rows


@pytest.mark.parametrize("width", [80, 100, 200])
def test_keys_and_numbers_are_whole(width: int) -> None:
    outcomes = (Kind.MEASURED,) * 100 + (Kind.FAILED,) * 20 + (Kind.REJECTED,) * 15
    states = [progress(workload, outcomes, record(workload.key, {"rows": 1})) for workload in WORKLOADS]
    rows = rendered(states, width)
    assert [row[-1] for row in rows] == [workload.key for workload in WORKLOADS]
    numbers = ["1234", "750.00 ms", "500.00 ms", "1.50 x", "2.50", "135 20 failed 15 rejected"]
    assert all(row[:-1] == numbers for row in rows)


def test_a_word_that_is_too_long_for_the_column_is_folded() -> None:
    long = Product(Extents(1024, 518400, 473600, 102400), "left")
    (row,) = rendered([progress(long, (Kind.MEASURED,))], 80)
    assert row[-1].replace(" ", "") == long.key.replace(" ", "")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12e-6, "12.0 us"), (99.9e-6, "99.9 us"), (1e-4, "0.10 ms"), (0.99999, "999.99 ms"), (1.0, "1.000 s")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_tasks_without_a_record_say_so() -> None:
    nothing, untried = progress(WORKLOADS[0], (Kind.MEASURED,)), progress(WORKLOADS[1], ())
    first, second = rendered([untried, nothing], 80)
    assert first == ["1234", "750.00 ms", "750.00 ms", "none", "", "1", WORKLOADS[0].key]
    assert second == ["1234", "", "not tried", "", "", "0", WORKLOADS[1].key]
    assert rendered([], 80) == []


def test_totals_count_every_call() -> None:
    gained = progress(WORKLOADS[0], (Kind.MEASURED,), record(WORKLOADS[0].key, {"rows": 1}))
    states = [gained, progress(WORKLOADS[1], (Kind.MEASURED,)), progress(WORKLOADS[2], ())]
    before, after = 2 * 1234 * 0.75, 1234 * (0.75 + 0.5)
    sentence = describe_totals(states)
    assert sentence.startswith("1 of 3 tasks have a schedule better than the default; the 2 that were measured")
    assert f"{format_duration(before)} together, {format_duration(after)} with" in sentence
    assert sentence.endswith(f"{before / after:.3f} x.")
    assert describe_totals(states[2:]) == "No task was measured."


def test_a_budget_ends_with_its_minutes_or_its_trials() -> None:
    assert Budget.of(None, None).minutes == 10 and Budget.of(None, 5).minutes is None
    trials = Budget.of(None, 5)
    assert trials.allows_more(4) and not trials.allows_more(5)
    assert trials.describe_rest(2) == "3 trials left"
    both = Budget(1.0, 5, start=Budget.of(1.0, 5).start - 30)
    assert both.allows_more(4) and both.describe_rest(4) == "0.5 min left, 1 trials left"
    over = Budget(1.0, None, start=both.start - 60)
    assert not over.allows_more(0) and over.describe_rest(0) == "0.0 min left"

"""Tables of models of scaling, as text for a terminal, and their picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from harness.compiler.targets.parallel import LAUNCH_NANOSECONDS, LAUNCH_NANOSECONDS_PER_THREAD
from perf.scaling import BANDWIDTH_PER_CORE, THREADS, Machine, Program
from perf.scaling_plot import draw
from perf.tables import text

Result = Mapping[str, Any]

_KERNELS = 8


def scaling_tables(results: Sequence[Result]) -> str:
    """Speed-up of every component and of its longest kernels, what the clock said, and what is assumed."""
    machine: Machine = results[-1]["machine"]
    tables = [_programs(programs_of(results), machine, "speed-up over one thread, and share of the threads' time")]
    clocks = Table(title="the model and the clock", title_justify="left")
    for heading in ("", "", "model, s", "clock, s", "model / clock"):
        clocks.add_column(heading)
    for result in results:
        name = result["name"]
        tables.append(_programs(_longest(result["program"]), machine, f"{name}: its longest kernels"))
        for what, (modelled, measured) in result["clock"].items():
            clocks.add_row(name, what, f"{modelled:.4g}", f"{measured:.4g}", f"{modelled / measured:.2f}")
    busy = [result["name"] for result in results if not result["quiet"]]
    notes = [f"other processes used the CPUs meanwhile, so that only processor time counts: {', '.join(busy)}"] * bool(
        busy
    )
    return text(*tables, clocks, *notes, _assumptions(machine))


def programs_of(results: Sequence[Result]) -> dict[str, Program]:
    """Returns what was measured by name: components, entry points of a folder, and all of these together."""
    programs: dict[str, Program] = {}
    for result in results:
        programs |= result["parts"] | {result["name"]: result["program"]}
    return programs


def draw_all(results: Sequence[Result], path: Path) -> None:
    """Writes the picture of a session."""
    draw(programs_of(results), results[-1]["machine"], path)


def _longest(program: Program) -> dict[str, Program]:
    found = program.by_function()
    return {name: found[name] for name in list(found)[:_KERNELS]}


def _programs(programs: Mapping[str, Program], machine: Machine, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("1 thread, ms", justify="right")
    table.add_column("loops", justify="right")
    for heading in _headings():
        table.add_column(heading, justify="right")
    for name, program in programs.items():
        loops = sum(len(call.loops) for call in program.calls)
        table.add_row(name, f"{1e3 * program.seconds(1, machine):.3g}", str(loops), *_row(program, machine))
    return table


def _headings() -> Iterator[str]:
    yield from (str(threads) for threads in THREADS[1:])
    yield "static 16"
    yield "static 64"


def _row(program: Program, machine: Machine) -> Iterator[str]:
    for threads in THREADS[1:]:
        yield f"{program.speedup(threads, machine):.1f} ({program.efficiency(threads, machine):.0%})"
    for threads in (16, 64):
        yield f"{program.efficiency(threads, machine, 'static'):.0%}"


def _assumptions(machine: Machine) -> str:
    return (
        f"Assumed: every core and its caches are as this one's; memory gives {BANDWIDTH_PER_CORE / 1e9:g} GB/s "
        f"to each core, and {machine.least / 1e9:.3g} GB/s at least; a loop costs {LAUNCH_NANOSECONDS / 1e3:g} µs and "
        f"{LAUNCH_NANOSECONDS_PER_THREAD / 1e3:g} µs for each thread."
    )

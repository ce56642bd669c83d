"""`sam3-tvm tune --space rules`: MetaSchedule over a component in TVM's plain loops, with TVM's own rules only."""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.tuning.showing import duration, looked_for, say, say_stopped, shown

if TYPE_CHECKING:
    from harness.tuning.request import Request
    from harness.tuning.rules_module import RulesTask
    from harness.tuning.rules_search import TaskState


def tune_rules(console: Console, request: Request, cases: Sequence[Case], folder: Path) -> int:
    """Searches, and prints how it goes and what was found.

    Args:
        console: Where to print.
        request: For how long, with what seed, on which machines, and which tasks.
        cases: The components.
        folder: The database; the records go into a folder within it.

    Returns:
        The exit code: 0, or 130 if it was interrupted.

    Raises:
        HarnessError: There is nothing to tune or nothing to measure on, or the records cannot be used.
    """
    if find_spec("xgboost") is None:
        raise HarnessError("--space rules needs xgboost: pip install 'sam3-tvm[tune]'")
    from harness.processes.threads import thread_count
    from harness.targets import TARGETS
    from harness.tuning.database import this_place
    from harness.tuning.rules_measuring import LocalMeasurer, Measurer, RemoteMeasurer
    from harness.tuning.rules_records import opened_for_tuning
    from harness.tuning.rules_search import Bench, search

    measurer: Measurer
    with ExitStack() as stack:
        if request.remote is None:
            measurer = LocalMeasurer()
        else:
            from harness.tuning.remote import RemoteRunner

            runner = RemoteRunner(request.remote, request.key)
            stack.callback(runner.close)
            measurer = RemoteMeasurer(runner, runner.workers)
        stack.callback(measurer.close)
        opened = stack.enter_context(opened_for_tuning(folder, this_place(request.target)))
        for notice in opened.notices:
            say(console, f"Note: {notice}")
        tasks = _tasks(console, cases, request.only)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sam3-tvm-rules-")))
        target = TARGETS[request.target].tvm_target()
        bench = Bench(target, opened, measurer, scratch, thread_count(), request.seed)
        torch = _torch_seconds(tasks) if request.remote is None else {}
        go_on, after_trial = stack.enter_context(shown(console, request, f"{len(tasks)} tasks"))
        states, interrupted = search(
            tasks, bench, go_on, lambda state: after_trial(_told(state, torch)), request.trials
        )
    console.print(_table(states, torch, folder))
    for state in states:
        if state.problem:
            say(console, f"Note: {state.problem}")
        for reason, count in sorted(state.reasons.items(), key=lambda entry: -entry[1])[:3]:
            say(console, f"{state.task.name}: {count} candidates: {reason[:160]}")
    return say_stopped(console, folder) if interrupted else 0


def component_tasks(request: tuple[Case, str | None], announce: Callable[[str], None]) -> list[RulesTask]:
    """The tasks of a component's main sample in plain loops, as `harness.processes` calls it."""
    from harness.targets import TARGETS
    from harness.tuning.rules_module import extract_tasks, plain_loops
    from harness.verify.importing import imported_module

    case, only = request
    target = TARGETS[case.target].tvm_target()
    module = imported_module(case, announce)
    return list(extract_tasks(plain_loops(module, target), target, only))


def _tasks(console: Console, cases: Sequence[Case], only: str | None) -> list[RulesTask]:
    import tvm_ffi

    if only is not None:
        try:
            re.compile(only)
        except re.error as error:
            raise HarnessError(f"--only {only}: not a regular expression: {error}") from error
    found: dict[int, RulesTask] = {}
    for case in cases:
        for task in looked_for(console, case, "harness.tuning.rules:component_tasks", (case, only)):
            key = int(tvm_ffi.structural_hash(task.module))
            known = found.get(key)
            found[key] = task if known is None else replace(known, weight=known.weight + task.weight)
    if not found:
        names = ", ".join(case.component for case in cases)
        raise HarnessError(
            f"{names}: no task{'' if only is None else f' matches --only {only}'}, there is nothing to tune"
        )
    return list(found.values())


def _told(state: TaskState, torch: Mapping[str, float]) -> str:
    """What is known of a task."""
    parts = [f"{state.task.name}: {state.trials} trials"]
    if math.isfinite(state.best):
        parts.append(f"best {duration(state.best)}, {state.task.flop / state.best / 1e9:.1f} GFLOP/s")
        if state.task.name in torch:
            parts.append(f"{torch[state.task.name] / state.best:.2f} x PyTorch")
    return ", ".join(parts)


def _table(states: Sequence[TaskState], torch: Mapping[str, float], folder: Path) -> Table:
    table = Table("task", "calls", "best", "GFLOP/s", "PyTorch GFLOP/s", "PyTorch / best", "trials", title=str(folder))
    for state in sorted(states, key=lambda state: -state.task.flop * state.task.weight):
        name, flop = state.task.name, state.task.flop
        counts = [str(state.trials)]
        counts += [
            f"{count} {word}" for count, word in ((state.failed, "failed"), (state.rejected, "rejected")) if count
        ]
        found = math.isfinite(state.best)
        table.add_row(
            Text(name),
            str(state.task.weight),
            duration(state.best) if found else "nothing found",
            f"{flop / state.best / 1e9:.1f}" if found else "",
            f"{flop / torch[name] / 1e9:.1f}" if name in torch else "",
            f"{torch[name] / state.best:.2f}" if found and name in torch else "",
            ", ".join(counts),
        )
    return table


def _torch_seconds(tasks: Sequence[RulesTask]) -> dict[str, float]:
    """PyTorch's time of the linear layers among the tasks; other tasks are no single operator of it."""
    from harness.tuning.measuring import RunError
    from harness.tuning.worker import Worker

    worker = Worker(torch=True)
    times = {}
    try:
        for task in tasks:
            shapes = [tuple(int(extent) for extent in p.shape) for p in task.module["main"].params[:-1]]
            if _is_linear(task.name, shapes):
                with suppress(RunError):
                    times[task.name] = float(worker.run(_linear_seconds, shapes, seconds=120.0))
    finally:
        worker.close()
    return times


def _is_linear(name: str, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a task is the product of two matrices, plus a vector."""
    if not re.match(r"fused_matmul\d*_add\d* ", name) or [len(shape) for shape in shapes] != [2, 2, 1]:
        return False
    return shapes[0][1] == shapes[1][0] and shapes[1][1] == shapes[2][0]


def _linear_seconds(shapes: Sequence[tuple[int, ...]]) -> float:
    """Median of five calls of PyTorch's linear layer, after one to warm up."""
    import torch

    left, right, bias = (torch.randn(shape) for shape in shapes)
    weight = right.T.contiguous()
    times = []
    with torch.inference_mode():
        for _ in range(6):
            start = time.perf_counter()
            torch.nn.functional.linear(left, weight, bias)
            times.append(time.perf_counter() - start)
    return sorted(times[1:])[2]

"""Runs cases in worker processes, one or a few at a time, and compares every outcome with its expectation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from msgspec import structs

from harness.compiler.lowering.frontends import FRONTENDS
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.targets import TARGETS
from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import WEIGHTS, Case
from harness.core.errors import HarnessError
from harness.core.expectations import ANY, Expectation, expectation_for, load_expectations
from harness.core.outcome import Outcome, Stage, Status
from harness.core.precision import PRECISIONS
from harness.core.processes.call import Template, WorkerEnd, WorkerResult, run_isolated
from harness.core.settings import SEEDED, Settings
from harness.models.model import Model
from harness.models.registry import models, subjects
from harness.verify.report import Result


@dataclass(frozen=True)
class Limits:
    """The limits of one case: seconds of wall-clock time, bytes of resident memory; None for no limit."""

    timeout: float | None = None
    memory_bytes: int | None = None


UNLIMITED = Limits()


@cache
def expectations() -> tuple[Expectation, ...]:
    """Returns the expectations of every model, checked against the registries.

    Raises:
        HarnessError: A model's file is missing, as in an installation without a checkout, or an entry is wrong.
    """
    names = {
        "strategy": STRATEGIES.keys(),
        "target": TARGETS.keys(),
        "precision": PRECISIONS.keys(),
        "frontend": FRONTENDS.keys(),
        "weights": WEIGHTS,
    }
    expanded: list[Expectation] = []
    for model in models().values():
        if model.expectations is None:
            continue
        if not model.expectations.is_file():
            raise HarnessError(f"{model.expectations} is missing: verify in a checkout, set up by `make setup`.")
        entries = load_expectations(model.expectations, {"component": model.subjects.keys(), **names})
        expanded += [_expand_wildcard(entry, model) for entry in entries]
    return tuple(expanded)


def _expand_wildcard(entry: Expectation, model: Model) -> Expectation:
    """Returns an entry of a model's file with `*` replaced by the names of that model's subjects."""
    return structs.replace(entry, component=tuple(model.subjects)) if ANY in entry.component else entry


def verify_case(
    case: Case,
    settings: Settings = SEEDED,
    limits: Limits = UNLIMITED,
    on_stage: Callable[[str], None] = lambda stage: None,
    template: Template | None = None,
    stop: threading.Event | None = None,
    float32: Groups = NO_GROUPS,
) -> Result:
    """Runs one case through its stages in a worker process, and compares its outcome with the expectation.

    Args:
        case: The case.
        settings: Weights, inputs and devices.
        limits: Limits of time and memory.
        on_stage: Called with the name of each stage, soon after the worker has entered it.
        template: Template from `library_template`, which is forked if the case's target is `forkable`.
        stop: Event that another thread sets to end the case.
        float32: Groups of products that stay float32 in half precision.

    Raises:
        HarnessError: The input or the environment is wrong.
        harness.core.processes.Stopped: `stop` was set.
    """
    expectation = expectation_for(case, expectations())
    result = run_isolated(
        "harness.verify.stages:run_request",
        (case, replace(settings, expectation=expectation), float32),
        timeout=limits.timeout,
        memory_limit_bytes=limits.memory_bytes,
        on_stage=on_stage,
        template=template if TARGETS[case.target].forkable else None,
        stop=stop,
    )
    return Result.from_outcome(case, outcome_of(result), expectation)


def verify_cases(
    cases: Sequence[Case],
    settings: Settings,
    limits: Limits,
    on_stage: Callable[[Case, str], None] = lambda case, stage: None,
    jobs: int = 1,
    float32: Mapping[str, Groups] = MappingProxyType({}),
) -> Iterator[Result]:
    """Verifies cases, and yields each result as soon as it is available.

    Args:
        cases: The cases, which run in this order if `jobs` is 1.
        settings: As for `verify_case`.
        limits: Limits of each case.
        on_stage: Called with a case and the name of the stage that it enters; by several threads if `jobs` is above 1.
        jobs: Number of cases that run at a time. `core.processes.threads.share_cpus` makes them share CPUs well.
        float32: By the name of a subject, groups of products that stay float32 in half precision.

    Raises:
        HarnessError: The input or the environment is wrong; no other case continues then.
    """
    with closing(library_template()) as template:
        if jobs > 1:
            yield from _verify_concurrently(cases, settings, limits, on_stage, template, jobs, float32)
            return
        for case in cases:
            groups = float32.get(case.component, NO_GROUPS)
            yield verify_case(case, settings, limits, partial(on_stage, case), template, float32=groups)


def _verify_concurrently(
    cases: Sequence[Case],
    settings: Settings,
    limits: Limits,
    on_stage: Callable[[Case, str], None],
    template: Template,
    jobs: int,
    float32: Mapping[str, Groups],
) -> Iterator[Result]:
    stop = threading.Event()
    # A whole model takes longest: started last, it would run alone at the end.
    order = sorted(cases, key=lambda case: not subjects()[case.component].whole)

    def verify(case: Case) -> Result:
        groups = float32.get(case.component, NO_GROUPS)
        return verify_case(case, settings, limits, partial(on_stage, case), template, stop, groups)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for future in as_completed([pool.submit(verify, case) for case in order]):
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def library_template() -> Template:
    """Returns the template of processes that verify a case, which imports their slow libraries once."""
    return Template("harness.verify.stages:load_libraries")


def outcome_of(result: WorkerResult) -> Outcome:
    """Returns the outcome of a case, even if its process died before it could report one."""
    if result.kind is WorkerEnd.OK:
        outcome: Outcome = result.value
        return replace(outcome, peak_rss_bytes=result.peak_rss_bytes)
    stage = Stage(result.stage) if result.stage else Stage.BUILD
    return Outcome(
        stage, Status(result.kind.value), result.error, _seconds(result), peak_rss_bytes=result.peak_rss_bytes
    )


def _seconds(result: WorkerResult) -> dict[str, float]:
    """Computes the time of each finished stage from the breadcrumbs."""
    seconds: dict[str, float] = {}
    for stage, next_stage in zip(result.breadcrumbs, result.breadcrumbs[1:], strict=False):
        seconds[stage.stage] = seconds.get(stage.stage, 0.0) + next_stage.seconds - stage.seconds
    return seconds


def repro_flags(settings: Settings, threads: int | None = None, budgets: Sequence[Path] = ()) -> tuple[str, ...]:
    """Returns the command-line flags that reproduce a case, in addition to the case's own."""
    flags: tuple[str, ...]
    if settings.model is not None:
        flags = ("--model", _relative_path(settings.model))
    else:
        flags = ("--untuned",) if settings.database is None else ("--db", _relative_path(settings.database))
    if settings.checkpoint is not None:
        flags += ("--checkpoint", _relative_path(settings.checkpoint))
    if settings.allow_partial:
        flags += ("--allow-partial",)
    if settings.image is not None:
        flags += ("--image", _relative_path(settings.image))
    for budget in budgets:
        flags += ("--budget", _relative_path(budget))
    if settings.emulate:
        flags += ("--emulate",)
    flags += settings.processors.flags
    if threads is not None:
        flags += ("--threads", str(threads))
    if settings.remote is not None:
        flags += settings.remote.flags
    return flags


def _relative_path(path: Path) -> str:
    """Returns a path relative to the current folder if it is inside, so that a command works in other checkouts."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def exit_code(results: Sequence[Result], required: Collection[str] = ()) -> int:
    """Returns the exit code of `sam3-tvm verify`: 0 if nothing is wrong, 1 otherwise.

    A case that was compiled but that no device here can run is not wrong, whatever its target. It is wrong if the
    target is required, which takes a device and no emulation. A run that could not compile anything has verified
    nothing, which is wrong.

    Args:
        results: Results of every case.
        required: Names of the targets whose cases must run on a device.
    """
    unexpected = any(result.expected is False for result in results)
    not_run = any(
        result.case.target in required and (result.expected is None or result.outcome.emulated) for result in results
    )
    any_compiled = any(result.expected or result.outcome.compiled for result in results)
    return int(unexpected or not_run or not any_compiled)

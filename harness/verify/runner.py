"""Run cases, each in its own worker, one or a few at a time, and hold every outcome to its expectation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.expectations import ANY, Expectation, expectation_for, load_expectations
from harness.core.outcome import Outcome, Stage, Status
from harness.core.precision import PRECISIONS
from harness.core.settings import SEEDED, Settings
from harness.core.weights import WEIGHTS
from harness.lowering.frontends import FRONTENDS
from harness.lowering.rope import STRATEGIES
from harness.models.model import Model
from harness.models.registry import models, subjects
from harness.processes import Template, WorkerEnd, WorkerResult, run_isolated
from harness.report import Result
from harness.targets import TARGETS


@dataclass(frozen=True)
class Limits:
    """The limits of one case: seconds of wall-clock time, bytes of resident memory; None for no limit."""

    timeout: float | None = None
    memory_bytes: int | None = None


UNLIMITED = Limits()


@cache
def expectations() -> tuple[Expectation, ...]:
    """Returns the entries of every model's expectations, checked against the registries.

    Raises:
        HarnessError: A model's file is missing, as in an installation without a checkout, or an entry is wrong.
    """
    known = {
        "strategy": STRATEGIES.keys(),
        "target": TARGETS.keys(),
        "precision": PRECISIONS.keys(),
        "frontend": FRONTENDS.keys(),
        "weights": WEIGHTS,
    }
    found: list[Expectation] = []
    for model in models().values():
        if model.expectations is None:
            continue
        if not model.expectations.is_file():
            raise HarnessError(f"{model.expectations} is missing: verify in a checkout, set up by `make setup`.")
        entries = load_expectations(model.expectations, {"component": model.subjects.keys(), **known})
        found += [_of(entry, model) for entry in entries]
    return tuple(found)


def _of(entry: Expectation, model: Model) -> Expectation:
    """Returns an entry of a model's file, which names subjects of that model alone."""
    return replace(entry, component=tuple(model.subjects)) if ANY in entry.component else entry


def verify_case(
    case: Case,
    settings: Settings = SEEDED,
    limits: Limits = UNLIMITED,
    on_stage: Callable[[str], None] = lambda stage: None,
    template: Template | None = None,
    stop: threading.Event | None = None,
    float32: Groups = NO_GROUPS,
) -> Result:
    """Walks one case through its stages in a worker process, and compares its outcome with what is expected.

    Args:
        case: What to run.
        settings: Weights, inputs, where outputs are kept.
        limits: When to give up.
        on_stage: Called with the name of each stage, soon after it was entered.
        template: One of `libraries_loaded`, which the worker is forked off if the case's target is `forkable`.
        stop: Another thread sets it to give up.
        float32: Groups of products that stay float32 in a half precision.

    Raises:
        HarnessError: If the input or the environment is at fault.
        harness.processes.Stopped: `stop` was set.
    """
    expectation = expectation_for(case, expectations())
    ended = run_isolated(
        "harness.verify.stages:run_request",
        (case, replace(settings, expectation=expectation), float32),
        timeout=limits.timeout,
        memory_limit_bytes=limits.memory_bytes,
        on_stage=on_stage,
        template=template if TARGETS[case.target].forkable else None,
        stop=stop,
    )
    return Result.of(case, outcome_of(ended), expectation)


def verify_cases(
    cases: Sequence[Case],
    settings: Settings,
    limits: Limits,
    on_stage: Callable[[Case, str], None] = lambda case, stage: None,
    jobs: int = 1,
    float32: Mapping[str, Groups] = MappingProxyType({}),
) -> Iterator[Result]:
    """Verifies cases, and yields each result as soon as it is there.

    Args:
        cases: What to run, in this order if it is one at a time.
        settings: As for `verify_case`.
        limits: Limits of each case.
        on_stage: Called with a case and the name of the stage that it enters; by several threads if `jobs` is above 1.
        jobs: Number of cases that run at a time. `harness.processes.threads.share_cpus` makes them share well.
        float32: By the name of a subject, groups of products that stay float32 in a half precision.

    Raises:
        HarnessError: If the input or the environment is at fault; no other case goes on then.
    """
    with closing(libraries_loaded()) as template:
        if jobs > 1:
            yield from _side_by_side(cases, settings, limits, on_stage, template, jobs, float32)
            return
        for case in cases:
            kept = float32.get(case.component, NO_GROUPS)
            yield verify_case(case, settings, limits, partial(on_stage, case), template, float32=kept)


def _side_by_side(
    cases: Sequence[Case],
    settings: Settings,
    limits: Limits,
    on_stage: Callable[[Case, str], None],
    template: Template,
    jobs: int,
    float32: Mapping[str, Groups],
) -> Iterator[Result]:
    stop = threading.Event()
    # A whole model takes longest: begun last, it would end alone.
    order = sorted(cases, key=lambda case: not subjects()[case.component].whole)

    def verify(case: Case) -> Result:
        kept = float32.get(case.component, NO_GROUPS)
        return verify_case(case, settings, limits, partial(on_stage, case), template, stop, kept)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            for ended in as_completed([pool.submit(verify, case) for case in order]):
                yield ended.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def libraries_loaded() -> Template:
    """Returns the template of processes that verify a case: what takes them seconds to import is loaded once."""
    return Template("harness.verify.stages:load_libraries")


def outcome_of(ended: WorkerResult) -> Outcome:
    """Returns the outcome of a case, also where its process died before it could tell."""
    if ended.kind is WorkerEnd.OK:
        outcome: Outcome = ended.value
        return replace(outcome, peak_rss_bytes=ended.peak_rss_bytes)
    stage = Stage(ended.stage) if ended.stage else Stage.BUILD
    return Outcome(stage, Status(ended.kind.value), ended.error, _seconds(ended), peak_rss_bytes=ended.peak_rss_bytes)


def _seconds(ended: WorkerResult) -> dict[str, float]:
    """Computes the time of each finished stage from the breadcrumbs."""
    seconds: dict[str, float] = {}
    for crumb, following in zip(ended.breadcrumbs, ended.breadcrumbs[1:], strict=False):
        seconds[crumb.stage] = seconds.get(crumb.stage, 0.0) + following.seconds - crumb.seconds
    return seconds


def repro_flags(settings: Settings, threads: int | None = None, budgets: Sequence[Path] = ()) -> tuple[str, ...]:
    """Returns the flags that reproduce a case, besides the case's own."""
    flags: tuple[str, ...]
    if settings.model is not None:
        flags = ("--model", _from_here(settings.model))
    else:
        flags = ("--untuned",) if settings.database is None else ("--db", _from_here(settings.database))
    if settings.checkpoint is not None:
        flags += ("--checkpoint", _from_here(settings.checkpoint))
    if settings.allow_partial:
        flags += ("--allow-partial",)
    if settings.image is not None:
        flags += ("--image", _from_here(settings.image))
    for budget in budgets:
        flags += ("--budget", _from_here(budget))
    if settings.emulate:
        flags += ("--emulate",)
    flags += settings.processors.flags
    if threads is not None:
        flags += ("--threads", str(threads))
    if settings.remote is not None:
        flags += settings.remote.flags
    return flags


def _from_here(path: Path) -> str:
    """Returns a path below the current folder relative to it, so that the command works in another checkout too."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def exit_code(results: Sequence[Result], required: Collection[str] = ()) -> int:
    """Returns the exit code of `sam3-tvm verify`: 0 if nothing is wrong, 1 otherwise.

    A case that was compiled and that nothing here can run is not wrong, whatever its target, unless the target is
    required, which takes a device and no emulation. A run that could not even compile anything has shown nothing, which
    is wrong.

    Args:
        results: Results of every case.
        required: Names of the targets whose cases must run on a device.
    """
    unexpected = any(result.expected is False for result in results)
    missing = any(
        result.case.target in required and (result.expected is None or result.outcome.emulated) for result in results
    )
    shown = any(result.expected or result.outcome.compiled for result in results)
    return int(unexpected or missing or not shown)

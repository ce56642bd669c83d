"""Runs cases in worker processes, one or a few at a time, and compares every outcome with its expectation."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

from msgspec import structs

from harness.compiler.lowering.frontends import EXPORTING_PROGRAMS, FRONTENDS
from harness.compiler.lowering.rope import STRATEGIES
from harness.compiler.targets import HOST, TARGETS
from harness.core.budget import NO_GROUPS, Groups
from harness.core.case import WEIGHTS, Case
from harness.core.errors import HarnessError
from harness.core.expectations import ANY, Expectation, expectation_for, load_expectations
from harness.core.outcome import Outcome, Stage, Status
from harness.core.precision import PRECISIONS
from harness.core.processes.call import Template, WorkerEnd, WorkerResult, run_isolated
from harness.core.settings import SEEDED, Settings
from harness.models.registry import component_of, models, subjects
from harness.verify.diagnose.diagnosis import Diagnosis
from harness.verify.diagnose.report import document
from harness.verify.report import Result


@dataclass(frozen=True)
class Limits:
    """The limits of one case: seconds of wall-clock time, bytes of resident memory; None for no limit."""

    timeout: float | None = None
    memory_bytes: int | None = None


UNLIMITED = Limits()


RunIsolated = Callable[..., WorkerResult]
"""Calls a function in a process of its own; it takes what `harness.core.processes.call.run_isolated` takes."""


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
        names_of_model = tuple(model.subjects)
        expanded += [
            structs.replace(entry, component=names_of_model) if ANY in entry.component else entry for entry in entries
        ]
    return tuple(expanded)


def verify_case(
    case: Case,
    settings: Settings = SEEDED,
    limits: Limits = UNLIMITED,
    on_stage: Callable[[str], None] = lambda stage: None,
    template: Template | None = None,
    stop: threading.Event | None = None,
    run: RunIsolated = run_isolated,
) -> Result:
    """Runs one case through its stages in a worker process, and compares its outcome with the expectation.

    Args:
        case: The case.
        settings: Weights, inputs, devices and the groups of products that stay float32.
        limits: Limits of time and memory.
        on_stage: Called with the name of each stage, soon after the worker has entered it.
        template: Template from `library_template`, which is forked if the case's target is `forkable`.
        stop: Event that another thread sets to end the case.
        run: Function that runs the worker process.

    Raises:
        HarnessError: The input or the environment is wrong.
        harness.core.processes.call.Stopped: `stop` was set.
    """
    expectation = expectation_for(case, expectations())
    result = run(
        "harness.verify.stages:run_case",
        case,
        replace(settings, expectation=expectation),
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
    run: RunIsolated = run_isolated,
) -> Iterator[Result]:
    """Verifies cases, and yields each result as soon as it is available.

    Args:
        cases: The cases, which run in this order if `jobs` is 1.
        settings: As for `verify_case`.
        limits: Limits of each case.
        on_stage: Called with a case and the name of the stage that it enters; by several threads if `jobs` is above 1.
        jobs: Number of cases that run at a time. `core.processes.threads.share_cpus` makes them share CPUs well.
        float32: By the name of a subject, groups of products that stay float32 in half precision.
        run: As for `verify_case`.

    Raises:
        HarnessError: The input or the environment is wrong; no other case continues then.
    """
    stop = threading.Event()

    def verify(case: Case) -> Result:
        case_settings = replace(settings, float32=float32.get(case.component, NO_GROUPS))
        return verify_case(case, case_settings, limits, partial(on_stage, case), template, stop, run)

    with closing(library_template()) as template:
        if jobs == 1:
            yield from map(verify, cases)
            return
        # A whole model takes longest: started last, it would run alone at the end.
        order = sorted(cases, key=lambda case: not subjects()[case.component].whole)
        pool = ThreadPoolExecutor(jobs)
        try:
            for future in as_completed([pool.submit(verify, case) for case in order]):
                yield future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)


def diagnose_case(
    case: Case,
    settings: Settings,
    output: str | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
    *,
    reproduce: bool = False,
    limits: Limits = UNLIMITED,
) -> Diagnosis:
    """Diagnoses the main program of a component, in a separate process.

    Args:
        case: The case; its target must run on this CPU.
        settings: Weights, inputs, schedules, processors and the groups of products that stay float32.
        output: Name of an output, to report only the calls on which it depends; None for all.
        on_stage: Called with the name of each stage, soon after the process has entered it.
        reproduce: Whether to build a reproduction of the first divergent kernel without this project.
        limits: Limits of the process.

    Raises:
        HarnessError: The case cannot be diagnosed, or does not run.
    """
    subject = component_of(case.component, "diagnose")
    if case.target != HOST.name:
        raise HarnessError(f"kernels of {case.target} cannot be followed yet: choose --target {HOST.name}")
    if reproduce and PRECISIONS[case.precision].is_half:
        raise HarnessError(f"a kernel in {case.precision} is named and not cut out: leave out --reproduce")
    if case.frontend not in EXPORTING_PROGRAMS:
        alternatives = " or ".join(EXPORTING_PROGRAMS)
        raise HarnessError(
            f"the frontend {case.frontend} keeps no nodes of torch.export: choose --frontend {alternatives}"
        )
    if output is not None and output not in subject.outputs:
        raise HarnessError(f"{case.component} has no output {output!r}: choose from {', '.join(subject.outputs)}")
    result = run_isolated(
        "harness.verify.diagnose.runner:diagnose_component",
        case,
        settings,
        output,
        reproduce,
        timeout=limits.timeout,
        memory_limit_bytes=limits.memory_bytes,
        on_stage=on_stage,
    )
    diagnosis: Diagnosis = result.require(f"cannot diagnose {case.id}")
    return diagnosis


def add_diagnosis(result: Result, settings: Settings, on_stage: Callable[[str], None], *, limits: Limits) -> Result:
    """Returns the result with a diagnosis, or why it has none; a result as expected is unchanged.

    Args:
        result: Result of a verified case.
        settings: Settings of the verification.
        on_stage: Called with the name of each stage, soon after the process has entered it.
        limits: Limits of the process.
    """
    if result.expected is not False or result.outcome.status is Status.PASSED:
        return result
    problem = _diagnosis_problem(result)
    if problem:
        return replace(result, not_diagnosed=problem)
    try:
        diagnosis = diagnose_case(
            result.case, settings, on_stage=lambda stage: on_stage(f"diagnosis: {stage}"), limits=limits
        )
    except HarnessError as error:
        return replace(result, not_diagnosed=str(error))
    return replace(result, diagnosis=document(diagnosis))


def _diagnosis_problem(result: Result) -> str:
    """Returns why a case cannot be diagnosed; empty if it can."""
    wrong = [verdict.name for verdict in result.outcome.verdicts if not verdict.kind.passes]
    if not wrong:
        return f"it ended at {result.outcome.stage.value} with no output that could be followed"
    if result.outcome.device is not None:
        return f"it ran on {result.outcome.device.name}, and kernels are followed on this machine alone"
    subject = subjects()[result.case.component]
    if not subject.whole and not set(wrong).intersection(subject.outputs):
        return f"{wrong[0]} is of another sample than the main one, which alone can be followed"
    return ""


def library_template() -> Template:
    """Returns the template of processes that verify a case, which imports their slow libraries once."""
    return Template("harness.verify.stages:load_libraries")


def outcome_of(result: WorkerResult) -> Outcome:
    """Returns the outcome of a case, even if its process died before it could report one."""
    if result.kind is WorkerEnd.OK:
        outcome: Outcome = result.value
        return replace(outcome, peak_rss_bytes=result.peak_rss_bytes)
    stage = Stage(result.stage) if result.stage else Stage.BUILD
    seconds: dict[str, float] = defaultdict(float)  # of each finished stage
    for entered, next_entered in pairwise(result.breadcrumbs):
        seconds[entered.stage] += next_entered.seconds - entered.seconds
    status = Status(result.kind.value)
    return Outcome(stage, status, result.error, dict(seconds), peak_rss_bytes=result.peak_rss_bytes)


def repro_flags(settings: Settings, threads: int | None = None, budgets: Sequence[Path] = ()) -> tuple[str, ...]:
    """Returns the command-line flags that reproduce a case, in addition to the case's own."""

    def option(name: str, path: Path | None) -> tuple[str, ...]:
        """Returns an option with a path, relative to the current folder if it is inside, as in another checkout."""
        if path is None:
            return ()
        return (name, str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))

    untuned = settings.model is None and settings.database is None
    return (
        *option("--model", settings.model),
        *(("--untuned",) if untuned else option("--db", settings.database)),
        *option("--checkpoint", settings.checkpoint),
        *(("--allow-partial",) if settings.allow_partial else ()),
        *option("--image", settings.image),
        *(word for name in settings.questions for word in ("--question", name)),
        *(word for budget in budgets for word in option("--budget", budget)),
        *(("--emulate",) if settings.emulate else ()),
        *settings.processors.flags,
        *(() if threads is None else ("--threads", str(threads))),
        *(() if settings.remote is None else settings.remote.flags),
    )


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

"""`sam3-tvm verify`: compile, run and judge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import console
from harness.cli.installation import require_compiler
from harness.cli.options import (
    WEIGHTS_HELP,
    BudgetOption,
    CheckpointOption,
    CpuOption,
    CudaArchOption,
    DatabaseOption,
    KeyOption,
    PartialOption,
    RemoteOption,
    SecretFileOption,
    SeedOption,
    ThreadsOption,
    UntunedOption,
    chosen_database,
    chosen_groups,
    chosen_weights,
)
from harness.core.budget import NONE
from harness.core.case import DEFAULT_FRONTEND, Case, Scale
from harness.core.errors import HarnessError
from harness.core.names import checked
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.core.processors import Processors
from harness.core.remote import chosen_remote
from harness.files import make_folder
from harness.lowering.frontends import FRONTENDS
from harness.models.registry import subjects
from harness.models.selection import select
from harness.runtime.manifest import Manifest
from harness.runtime.variants import described
from harness.targets import HOST, TARGETS
from harness.tuned import database

TIMEOUT, LONG_TIMEOUT = 3600, 14400
"""Seconds that a case may take, and one of a subject that takes long: PyTorch's side of `video` takes above an hour
on two cores of a Zen 4 that are busy."""


def verify(
    component: Annotated[
        list[str] | None,
        typer.Option(help="Component, or end_to_end for the whole model; repeat for several. Default: all but video."),
    ] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="RoPE strategy; repeatable. Default: all.")] = None,
    target: Annotated[list[str] | None, typer.Option(help=f"Target; repeatable. Default: {HOST.name}.")] = None,
    scale: Annotated[list[str] | None, typer.Option(help="shallow or full; repeatable. Default: shallow.")] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PRECISIONS)}; repeatable. Default: {DEFAULT_PRECISION}.")
    ] = None,
    frontend: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(FRONTENDS)}; repeatable. Default: {DEFAULT_FRONTEND}.")
    ] = None,
    seed: SeedOption = 0,
    weights: Annotated[list[str] | None, typer.Option(help=f"{WEIGHTS_HELP} Repeatable.")] = None,
    checkpoint: CheckpointOption = None,
    allow_partial: PartialOption = False,
    image: Annotated[Path | None, typer.Option(help="Photograph to capture inputs from. Default: fixtures/.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder of a compiled model to judge as it is, with the weights and options it was made with.",
        ),
    ] = None,
    report: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("reports/latest"),
    timeout: Annotated[
        float | None,
        typer.Option(min=1, help=f"Time limit of each case, seconds. Default: {TIMEOUT}, with video {LONG_TIMEOUT}."),
    ] = None,
    memory_limit: Annotated[float | None, typer.Option(min=0.1, help="Memory limit of each case, GiB.")] = None,
    threads: ThreadsOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cases that run at a time, each in as much memory as alone.")] = 1,
    judge_saved: Annotated[
        bool, typer.Option("--judge-saved", help="Judge the outputs that the last run saved; compile and run nothing.")
    ] = False,
    diagnosing: Annotated[
        bool, typer.Option("--diagnose", help="Name the kernel that diverges in each case whose outputs are wrong.")
    ] = False,
    require_target: Annotated[
        list[str] | None, typer.Option(help="Target whose cases must run on a device, not only compile; repeatable.")
    ] = None,
    emulate: Annotated[
        bool,
        typer.Option("--emulate", help="Run GPU kernels and code for AMX on a CPU without: minutes each."),
    ] = False,
    budget: BudgetOption = None,
    db: DatabaseOption = None,
    untuned: UntunedOption = False,
    cpu: CpuOption = None,
    cuda_arch: CudaArchOption = None,
    remote: RemoteOption = None,
    key: KeyOption = "",
    secret_file: SecretFileOption = None,
) -> None:
    """Export, compile and run each case, and judge every output against PyTorch and float64.

    Exit code 0: all as expected; what no device here can run was compiled. 1: something was not as expected, a required
    target did not run, or nothing could be compiled. 2: wrong usage or environment.
    """
    require_compiler()
    from harness.core.settings import Settings
    from harness.deployment.describing import seed_of
    from harness.diagnose.verified import diagnosed
    from harness.execution.remote.client import registered
    from harness.machine import describe_machine, versions
    from harness.processes.memory import keep_freed_memory
    from harness.processes.threads import configure_threads, share_cpus
    from harness.report import ADVICE, Result, write_report
    from harness.report.verification.writer import PAGE_NAME
    from harness.runtime.sam3.images import load_image
    from harness.verify.progress import diagnosis_told, show
    from harness.verify.runner import Limits, exit_code, repro_flags, verify_cases

    if model is not None and judge_saved:
        raise HarnessError("--model runs a folder and --judge-saved runs none: leave one of them out")
    if diagnosing and judge_saved:
        raise HarnessError("--diagnose runs cases again and --judge-saved runs none: leave one of them out")
    compiling = {"--diagnose": diagnosing, "--budget": budget, "--db": db, "--untuned": untuned}
    if model is not None and (flag := next((flag for flag, given in compiling.items() if given), "")):
        raise HarnessError(f"--model judges what is compiled, and {flag} is for what is to be: leave one of them out")
    configure_threads(threads)
    if Scale.FULL not in (scale or ()):
        keep_freed_memory()  # beside a full model, what is kept may not fit
    if jobs > 1:
        share_cpus()
    shipped = None if model is None else described(model)
    cases = select(
        component or _judged_by_default(shipped),
        strategy or (() if shipped is None else (shipped.strategy,)),
        target or (HOST.name if shipped is None else shipped.target,),
        scale or (Scale.SHALLOW if shipped is None else shipped.scale,),
        seed if shipped is None else seed or seed_of(shipped),
        precision or (DEFAULT_PRECISION if shipped is None else shipped.precision,),
        frontend or (DEFAULT_FRONTEND if shipped is None else shipped.frontend,),
        chosen_weights(weights or (), checkpoint),
    )
    if shipped is not None and (part := next((case for case in cases if not subjects()[case.component].whole), None)):
        raise HarnessError(f"--model judges whole models, and {part.component} is a component: leave one of them out")
    float32 = chosen_groups(budget or (), cases)
    required = _required(require_target or (), {case.target for case in cases})
    make_folder(report, advice=ADVICE)
    if image is not None:
        load_image(image)
    devices = chosen_remote(remote, key, secret_file)
    processors = Processors(cpu, cuda_arch)
    where: dict[str, str] = {}
    if devices is not None:
        device = registered(devices)
        processors, where = processors.otherwise(device.processors), {"runs on": f"{device}, {devices}"}
    chosen = None if model else chosen_database(db, untuned, {case.target for case in cases}, processors)
    settings = Settings(
        checkpoint,
        allow_partial,
        image=image,
        judge_saved=judge_saved,
        database=chosen,
        remote=devices,
        emulate=emulate,
        processors=processors,
        model=model,
    )
    limits = Limits(time_limit(timeout, cases), None if memory_limit is None else int(memory_limit * 2**30))
    schedules = (
        database.chosen_schedules(chosen, HOST.name, processors).origin
        if shipped is None
        else shipped.made.get("schedules", "not told")
    )
    machine = describe_machine() | {"schedules": schedules} | where
    if budget:
        counts = [f"{len(groups)} groups of products of {name}" for name, groups in float32.items()]
        machine["stay float32"] = f"{', '.join(counts)}, by {', '.join(map(str, budget))}"
    installed = versions()
    flags = repro_flags(settings, threads, budget or ())

    def verified(on_stage: Callable[[Case, str], None]) -> Iterator[Result]:
        for result in verify_cases(cases, settings, limits, on_stage, jobs, float32):
            entered = partial(on_stage, result.case)
            if not diagnosing:
                yield result
                continue
            yield diagnosed(
                result,
                settings,
                entered,
                timeout=limits.timeout,
                memory_limit_bytes=limits.memory_bytes,
                float32=float32.get(result.case.component, NONE),
            )

    results = show(
        console,
        cases,
        verified,
        lambda so_far: write_report(so_far, machine, installed, report, flags=flags),
    )
    for result in results:
        if told := diagnosis_told(result):
            console.print(told, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Report: {report / PAGE_NAME}, and VERIFICATION_REPORT.md beside it", soft_wrap=True)
    if compiled := sum(result.compiled_only for result in results):
        console.print(f"{compiled} of {len(results)} cases were compiled and not run; --require-target forbids it.")
    if code := exit_code(results, required):
        raise typer.Exit(code)


def _judged_by_default(shipped: Manifest | None) -> tuple[str, ...]:
    """The subjects that no name stands for: all that don't take long, or those that a compiled model answers.

    Raises:
        HarnessError: The model answers none.
    """
    quick = {name: subject for name, subject in subjects().items() if not subject.long}
    if shipped is None:
        return tuple(quick)
    answered = tuple(
        name
        for name, subject in quick.items()
        if subject.whole and subject.model == shipped.model and shipped.capacity.includes(subject.capacity)
    )
    if not answered:
        raise HarnessError(
            f"No question of a whole model can be asked of this one, {shipped.model}: {shipped.capacity}."
        )
    return answered


def time_limit(given: float | None, cases: Collection[Case]) -> float:
    """Returns the seconds that each case may take: what was given, or enough for the longest of them."""
    if given is not None:
        return given
    return LONG_TIMEOUT if any(subjects()[case.component].long for case in cases) else TIMEOUT


def _required(names: Sequence[str], targets: Collection[str]) -> tuple[str, ...]:
    """The targets that must run; without names, none.

    Raises:
        HarnessError: There is no such target, or no case of it was asked for.
    """
    required = checked("target", names, tuple(TARGETS)) if names else ()
    for name in required:
        if name not in targets:
            raise HarnessError(f"--require-target {name}, but no case of it was asked for: give --target {name}")
    return required

"""Defines `sam3-tvm verify`: compiles, runs and judges cases."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options
from harness.cli.console import console, print_sentence
from harness.compiler.lowering.frontends import FRONTENDS
from harness.compiler.targets import HOST, TARGETS
from harness.compiler.tuned import database
from harness.core.budget import NO_GROUPS
from harness.core.case import DEFAULT_FRONTEND, Case, Scale
from harness.core.errors import HarnessError
from harness.core.files import make_folder
from harness.core.names import plural, select_names
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.core.processors import Processors, Remote
from harness.models.registry import models, subjects
from harness.models.selection import select
from harness.models.subject import Subject
from harness.runtime.manifest import Manifest, read_any_manifest

TIMEOUT, LONG_TIMEOUT = 3600, 14400
"""Time limits of a case and of a slow subject's case, in seconds: PyTorch's side of the slowest takes above
an hour on two busy cores of a Zen 4."""


def verify(
    component: Annotated[
        list[str] | None,
        typer.Option(help="Component or whole model, see list; repeatable. Default: all but those that take long."),
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
    seed: options.SeedOption = 0,
    weights: Annotated[list[str] | None, typer.Option(help=f"{options.WEIGHTS_HELP} Repeatable.")] = None,
    checkpoint: options.CheckpointOption = None,
    allow_partial: options.PartialOption = False,
    image: Annotated[Path | None, typer.Option(help="Photograph to capture inputs from. Default: fixtures/.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose components and whole models are verified, or folder of a compiled model to judge as it "
            "is, with the weights and options it was made with. Default: all models.",
        ),
    ] = None,
    question: Annotated[
        list[str] | None, typer.Option(help="Question to ask one whole model, see fixtures/; repeatable. Default: all.")
    ] = None,
    report: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("reports/latest"),
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1, help=f"Time limit of each case, seconds. Default: {TIMEOUT}, with slow ones {LONG_TIMEOUT}."
        ),
    ] = None,
    memory_limit: Annotated[float | None, typer.Option(min=0.1, help="Memory limit of each case, GiB.")] = None,
    threads: options.ThreadsOption = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cases to run at the same time; each needs its memory.")] = 1,
    judge_saved: Annotated[
        bool, typer.Option("--judge-saved", help="Judge the outputs that the last run saved; compile and run nothing.")
    ] = False,
    with_diagnosis: Annotated[
        bool, typer.Option("--diagnose", help="Name the kernel that diverges in each case whose outputs are wrong.")
    ] = False,
    require_target: Annotated[
        list[str] | None, typer.Option(help="Target whose cases must run on a device, not only compile; repeatable.")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Emulate missing GPUs and AMX on this CPU: minutes for each case.")
    ] = False,
    budget: options.BudgetOption = None,
    db: options.DatabaseOption = None,
    untuned: options.UntunedOption = False,
    cpu: options.CpuOption = None,
    cuda_arch: options.CudaArchOption = None,
    remote: options.RemoteOption = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run the cases on the nodes of a Ray cluster that have what they need.")
    ] = False,
    ray_address: options.RayAddressOption = None,
) -> None:
    """Export, compile and run each case, and judge every output against PyTorch and float64.

    Exit code 0: every outcome is as expected; cases that no device here can run were compiled. 1: an outcome is not as
    expected, a required target did not run, or nothing could be compiled. 2: wrong usage or environment.
    """
    options.prepare_compiler(threads)
    from harness.compiler.deployment.describing import read_seed
    from harness.core.machine import describe_machine, versions
    from harness.core.processes.memory import keep_freed_memory
    from harness.core.processes.threads import share_cpus
    from harness.core.settings import Settings
    from harness.verify.progress import diagnosis_sentence, show_progress
    from harness.verify.report import ADVICE, Result, write_report
    from harness.verify.report.verification.writer import PAGE_NAME
    from harness.verify.runner import Limits, add_diagnosis, exit_code, repro_flags, verify_cases

    model_name, folder = _model_or_folder(model)
    if folder is not None and judge_saved:
        raise HarnessError("--model runs a folder and --judge-saved runs none: leave one of them out")
    if with_diagnosis and judge_saved:
        raise HarnessError("--diagnose runs cases again and --judge-saved runs none: leave one of them out")
    compile_options = {"--diagnose": with_diagnosis, "--budget": budget, "--db": db, "--untuned": untuned}
    if folder is not None and (flag := next((flag for flag, value in compile_options.items() if value), "")):
        raise HarnessError(f"--model compiles nothing, and {flag} needs a compilation: leave one of them out")
    alone = {"--remote": remote, "--diagnose": with_diagnosis, "--jobs": jobs > 1, "--judge-saved": judge_saved}
    options.check_ray(ray, ray_address, alone)
    if Scale.FULL not in (scale or ()):
        keep_freed_memory()  # freed memory may not fit beside a full model
    if jobs > 1:
        share_cpus()
    manifest = None if folder is None else read_any_manifest(folder)
    if model_name is not None and component:
        select_names("component", component, tuple(models()[model_name].subjects))
    defaults: dict[str, tuple[str, ...]] = {
        "strategy": (),
        "target": (HOST.name,),
        "scale": (Scale.SHALLOW,),
        "precision": (DEFAULT_PRECISION,),
        "frontend": (DEFAULT_FRONTEND,),
    }
    if manifest is not None:
        defaults = {name: (getattr(manifest, name),) for name in defaults}
    cases = select(
        component or _default_subjects(model_name, folder, manifest, checkpoint),
        strategy or defaults["strategy"],
        target or defaults["target"],
        scale or defaults["scale"],
        seed if manifest is None else seed or read_seed(manifest),
        precision or defaults["precision"],
        frontend or defaults["frontend"],
        options.chosen_weights(weights, checkpoint),
    )
    _check_subjects([subjects()[case.component] for case in cases], manifest, question or ())
    float32 = options.chosen_groups(budget, cases)
    targets = tuple(dict.fromkeys(case.target for case in cases))
    required = _required_targets(require_target or (), targets)
    make_folder(report, advice=ADVICE)
    seconds = time_limit(timeout, cases)
    device = None if remote is None else Remote(remote, seconds)
    processors, device_entry = _processors(Processors(cpu, cuda_arch), device, targets)
    database_folder = None if folder else options.chosen_database(db, untuned, targets, processors)
    settings = Settings(
        checkpoint,
        allow_partial,
        image=image,
        judge_saved=judge_saved,
        database=database_folder,
        remote=device,
        emulate=emulate,
        processors=processors,
        model=folder,
        questions=tuple(question or ()),
    )
    for name in dict.fromkeys(subjects()[case.component].model for case in cases):
        models()[name].check(settings)
        options.print_checkpoint(name, checkpoint)
    limits = Limits(seconds, None if memory_limit is None else int(memory_limit * 2**30))
    schedules = (
        database.choose_schedules(database_folder, HOST.name, processors).origin
        if manifest is None
        else manifest.made.get("schedules", "not told")
    )
    machine = describe_machine() | {"schedules": schedules} | device_entry
    if budget:
        counts = [f"{len(groups)} groups of products of {name}" for name, groups in float32.items()]
        machine["stay float32"] = f"{', '.join(counts)}, by {', '.join(map(str, budget))}"
    package_versions = versions()
    flags = repro_flags(settings, threads, budget or ())

    def verify_all(on_stage: Callable[[Case, str], None]) -> Iterator[Result]:
        if not ray:
            yield from verify_cases(cases, settings, limits, on_stage, jobs, float32)
            return
        from harness.core.cluster import connect
        from harness.verify.cluster import check_nodes, resolved, resources_of_machine, run_on_node

        with connect(ray_address, resources_of_machine()):
            machine["runs on"] = f"{plural(check_nodes(limits.memory_bytes), 'node')} of a Ray cluster"
            # Ray limits the number of cases that run at a time.
            yield from verify_cases(cases, resolved(settings), limits, on_stage, len(cases), float32, run_on_node)

    def run(on_stage: Callable[[Case, str], None]) -> Iterator[Result]:
        for result in verify_all(on_stage):
            if with_diagnosis:
                case_settings = replace(settings, float32=float32.get(result.case.component, NO_GROUPS))
                result = add_diagnosis(result, case_settings, partial(on_stage, result.case), limits=limits)
            yield result

    results = show_progress(
        console, cases, run, lambda finished: write_report(finished, machine, package_versions, report, flags=flags)
    )
    for result in results:
        if sentence := diagnosis_sentence(result):
            print_sentence(sentence)
    console.print(f"Report: {report / PAGE_NAME}, and VERIFICATION_REPORT.md beside it", soft_wrap=True)
    if compiled_count := sum(result.compiled_only for result in results):
        console.print(
            f"{compiled_count} of {len(results)} cases were compiled and not run; --require-target forbids it."
        )
    if code := exit_code(results, required):
        raise typer.Exit(code)


def _model_or_folder(value: str | None) -> tuple[str | None, Path | None]:
    """Returns the name of a model, or the folder of a compiled one, that `--model` gives.

    Raises:
        HarnessError: It is neither.
    """
    if value is None or value in models():
        return value, None
    if not (folder := Path(value)).is_dir():
        raise HarnessError(
            f"--model {value} is neither a folder nor a model's name: give {' or '.join(models())}, or the folder of a "
            "compiled model"
        )
    return None, folder


def _default_subjects(
    name: str | None, folder: Path | None, manifest: Manifest | None, checkpoint: Path | None
) -> tuple[str, ...]:
    """Returns the default subjects: those of a named model, of a checkpoint's, or of all, but the slow ones.

    Of a folder they are those that it answers.

    Raises:
        HarnessError: The model answers none of them.
    """
    if name is None and folder is None and checkpoint is not None:
        name = options.model_of(checkpoint)
    chosen = subjects() if name is None else models()[name].subjects
    quick = {name: subject for name, subject in chosen.items() if not subject.long}
    if folder is None or manifest is None:
        return tuple(quick)
    model, found = models().get(manifest.model), ""
    if model is not None and model.deployable is not None:
        model_options = model.deployable.options.read(folder, manifest)
        whole = {name: subject for name, subject in quick.items() if subject.whole and subject.model == model.name}
        if answerable := tuple(name for name, subject in whole.items() if model_options.includes(subject.options)):
            return answerable
        found = f": {model_options}" if whole else ""
    raise HarnessError(f"The folder can answer no question: it has the model {manifest.model}{found}.")


def _check_subjects(chosen: Sequence[Subject], manifest: Manifest | None, questions: Sequence[str]) -> None:
    """Checks that a folder, if there is one, can answer for all subjects, and that questions are for one whole model.

    Raises:
        HarnessError: They are not.
    """
    if manifest is not None:
        for subject in chosen:
            if not subject.whole:
                raise HarnessError(
                    f"--model judges whole models, and {subject.name} is a component: leave one of them out"
                )
            if subject.model != manifest.model:
                raise HarnessError(
                    f"--model is a folder of {manifest.model}, and {subject.name} is a subject of {subject.model}: "
                    f"leave out --component {subject.name}, or give a folder of {subject.model}"
                )
    if questions and (len({subject.name for subject in chosen}) > 1 or not chosen[0].whole):
        raise HarnessError("--question needs one whole model: give --component end_to_end, or another")


def _processors(
    processors: Processors, device: Remote | None, targets: Collection[str]
) -> tuple[Processors, dict[str, str]]:
    """Returns the processors to compile for, by default those of the device, and what a report says about that.

    Raises:
        HarnessError: The device cannot be used, or does not run one of the targets.
    """
    if device is None:
        return processors, {}
    from harness.compiler.execution.remote.client import describe_remote

    description = describe_remote(device)
    processors = processors.with_defaults(description.processors)
    for name in targets:
        if problem := description.problem(name, processors):
            raise HarnessError(problem)
    return processors, {"runs on": f"{description}, {device}"}


def time_limit(timeout: float | None, cases: Collection[Case]) -> float:
    """Returns the time limit of each case in seconds: the option's value, or enough for the slowest of them."""
    if timeout is not None:
        return timeout
    return LONG_TIMEOUT if any(subjects()[case.component].long for case in cases) else TIMEOUT


def _required_targets(names: Sequence[str], targets: Collection[str]) -> tuple[str, ...]:
    """Returns the targets whose cases must run; none without names.

    Raises:
        HarnessError: A target is unknown, or there is no case of it.
    """
    required = select_names("target", names, tuple(TARGETS)) if names else ()
    for name in required:
        if name not in targets:
            raise HarnessError(f"--require-target {name} needs a case of that target: give --target {name}")
    return required

"""The `sam3-tvm` command: parse, call, print."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness import __version__
from harness.cli.installation import require_compiler
from harness.core.case import DEFAULT_STRATEGY, SUBJECTS, Case, Scale, checked, select, strategies_of
from harness.core.errors import HarnessError
from harness.core.precision import DEFAULT_PRECISION, PRECISIONS
from harness.execution.remote.address import Remote, chosen_remote
from harness.lowering.rope import STRATEGIES
from harness.runtime.errors import Sam3Error
from harness.runtime.manifest import DEFAULT_CAPACITY, Capacity, Manifest
from harness.targets import TARGETS
from harness.tuning import database

if TYPE_CHECKING:
    from harness.explain import Explanation

CheckpointOption = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Weights: sam3.pt or safetensors. Default: seeded.")
]
PartialOption = Annotated[bool, typer.Option(help="Accept a checkpoint that lacks parameters.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the weights.")]
DatabaseOption = Annotated[
    Path | None,
    typer.Option(help="Folder of a tuning database. Default: the one in fixtures/tuned that fits this machine."),
]
UntunedOption = Annotated[bool, typer.Option("--untuned", help="Leave tuning databases out.")]

RemoteOption = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of an RPC tracker: run on a device that it knows, see serve-device."),
]
KeyOption = Annotated[str, typer.Option(help="What the devices are known by at the tracker.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Prove that SAM 3 compiled by TVM is SAM 3.")
console = Console()


@app.callback(invoke_without_command=True)
def version_option(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Prove that SAM 3 compiled by TVM is SAM 3."""
    if version:
        console.print(f"sam3-tvm {__version__}")
        raise typer.Exit


@app.command()
def verify(
    component: Annotated[
        list[str] | None,
        typer.Option(help="Component, or end_to_end for the whole model; repeat for several. Default: all."),
    ] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="RoPE strategy; repeatable. Default: all.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Target; repeatable. Default: llvm.")] = None,
    scale: Annotated[list[str] | None, typer.Option(help="shallow or full; repeatable. Default: shallow.")] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PRECISIONS)}; repeatable. Default: {DEFAULT_PRECISION}.")
    ] = None,
    seed: SeedOption = 0,
    checkpoint: CheckpointOption = None,
    allow_partial: PartialOption = False,
    image: Annotated[Path | None, typer.Option(help="Photograph to capture inputs from. Default: fixtures/.")] = None,
    report: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("reports/latest"),
    timeout: Annotated[float, typer.Option(min=1, help="Time limit of each case, seconds.")] = 3600,
    memory_limit: Annotated[float | None, typer.Option(min=0.1, help="Memory limit of each case, GiB.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads of TVM and PyTorch. Default: every CPU that may be used.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cases that run at a time, each in as much memory as alone.")] = 1,
    judge_saved: Annotated[
        bool, typer.Option("--judge-saved", help="Judge the outputs that the last run saved; compile and run nothing.")
    ] = False,
    require_target: Annotated[
        list[str] | None, typer.Option(help="Target whose cases must run on a device, not only compile; repeatable.")
    ] = None,
    emulate: Annotated[
        bool, typer.Option("--emulate", help="Run all CUDA kernels on the CPU where there is no GPU: minutes each.")
    ] = False,
    db: DatabaseOption = None,
    untuned: UntunedOption = False,
    remote: RemoteOption = None,
    key: KeyOption = "",
) -> None:
    """Export, compile and run each case, and judge every output against PyTorch and float64.

    Exit code 0: all as expected; what no device here can run was compiled. 1: something was not as expected, a required
    target did not run, or nothing could be compiled. 2: wrong usage or environment.
    """
    require_compiler()
    from harness.core.settings import Settings
    from harness.execution.place import compile_for
    from harness.machine import describe_machine, versions
    from harness.processes.memory import keep_freed_memory
    from harness.processes.threads import choose_threads, share_cpus
    from harness.report import check_writable, write_report
    from harness.runtime.sam3.images import load_image
    from harness.verify.progress import show
    from harness.verify.runner import Limits, exit_code, repro_flags, verify_cases

    choose_threads(threads)
    if Scale.FULL not in (scale or ()):
        keep_freed_memory()  # beside a full model, what is kept may not fit
    if jobs > 1:
        share_cpus()
    cases = select(
        component or tuple(SUBJECTS),
        strategy or (),
        target or ("llvm",),
        scale or (Scale.SHALLOW,),
        seed,
        precision or (DEFAULT_PRECISION,),
    )
    required = _required(require_target or (), {case.target for case in cases})
    check_writable(report)
    if image is not None:
        load_image(image)
    devices = chosen_remote(remote, key)
    where = {} if devices is None else {"runs on": f"{compile_for(devices)}, {devices}"}
    chosen = _database(db, untuned, {case.target for case in cases})
    settings = Settings(
        checkpoint,
        allow_partial,
        image=image,
        judge_saved=judge_saved,
        database=chosen,
        remote=devices,
        emulate=emulate,
    )
    limits = Limits(timeout, None if memory_limit is None else int(memory_limit * 2**30))
    machine = describe_machine() | {"schedules": database.told(chosen, "llvm")} | where
    installed = versions()
    results = show(
        console,
        cases,
        lambda on_stage: verify_cases(cases, settings, limits, on_stage, jobs),
        lambda so_far: write_report(so_far, machine, installed, report, flags=repro_flags(settings, threads)),
    )
    console.print(f"Report: {report / 'VERIFICATION_REPORT.md'}", soft_wrap=True)
    if compiled := sum(result.compiled_only for result in results):
        console.print(f"{compiled} of {len(results)} cases were compiled and not run; --require-target forbids it.")
    if code := exit_code(results, required):
        raise typer.Exit(code)


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


@app.command(name="explain")
def explain_command(
    component: Annotated[list[str] | None, typer.Option(help="Component; repeat for several. Default: all.")] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help=f"RoPE strategy; repeatable. Default: {DEFAULT_STRATEGY}.")
    ] = None,
    target: Annotated[str, typer.Option(help="Target to lower for.")] = "llvm",
    scale: Annotated[str, typer.Option(help="shallow or full.")] = Scale.SHALLOW.value,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for every call of every operator, with all that is known.")
    ] = None,
    db: DatabaseOption = None,
    untuned: UntunedOption = False,
) -> None:
    """Tell what becomes of each operator: which kernel, which loops, and what falls to TVM's default.

    It exports, imports and lowers each component on its main inputs; nothing is run.
    """
    require_compiler()
    from harness.explain import check_writable, render, summary, write_json

    cases = select(component or (), strategy or (DEFAULT_STRATEGY,), (target,), (scale,))
    if json_file is not None:
        check_writable(json_file)
    chosen = _database(db, untuned, {target})
    explanations = []
    for case in cases:
        explanations.append(_explained(case, chosen))
        console.print(render(explanations[-1]))
        console.print(summary(explanations[-1]), highlight=False, soft_wrap=True)
    if json_file is not None:
        write_json(explanations, json_file)


def _explained(case: Case, chosen: Path | None) -> Explanation:
    from harness.explain import explain

    with console.status(case.id) as status:
        return explain(case, lambda stage: status.update(f"{case.id} {stage}"), chosen)


def _database(db: Path | None, untuned: bool, targets: Collection[str]) -> Path | None:
    """The tuning database to compile with, of which something that does not fit is told.

    Raises:
        HarnessError: It cannot be used, or the options contradict each other.
    """
    if db is not None and untuned:
        raise HarnessError("--db and --untuned contradict each other: give one of them")
    if db is not None:
        for target in targets:
            database.open_database(db, target)
    if untuned or not set(targets) & set(database.TUNABLE):
        return None
    chosen = db or database.default_database(database.TUNABLE[0])
    for notice in () if chosen is None else database.open_database(chosen).notices():
        console.print(f"Note: {notice}", markup=False, highlight=False, soft_wrap=True)
    return chosen


@app.command(name="compile")
def compile_command(
    out: Annotated[Path, typer.Option(help="Folder to write; a compiled model that is there is replaced.")],
    target: Annotated[str, typer.Option(help="Target to compile for.")] = "llvm",
    scale: Annotated[str, typer.Option(help="shallow or full.")] = Scale.FULL.value,
    strategy: Annotated[str, typer.Option(help="RoPE strategy.")] = DEFAULT_STRATEGY,
    precision: Annotated[
        str, typer.Option(help=f"{', '.join(PRECISIONS)}: weights and operands of products, on GPUs.")
    ] = DEFAULT_PRECISION,
    checkpoint: CheckpointOption = None,
    allow_partial: PartialOption = False,
    seed: SeedOption = 0,
    points: Annotated[int, typer.Option(min=1, help="Most points in one prompt.")] = DEFAULT_CAPACITY.points,
    boxes: Annotated[int, typer.Option(min=1, help="Most boxes in one prompt.")] = DEFAULT_CAPACITY.boxes,
    db: DatabaseOption = None,
    untuned: UntunedOption = False,
) -> None:
    """Compile the whole model into a folder that runs without PyTorch."""
    require_compiler()
    from harness.deployment.compiling import Model, compile_model

    for kind, name, known in (
        ("target", target, TARGETS),
        ("scale", scale, [entry.value for entry in Scale]),
        ("strategy", strategy, STRATEGIES),
        ("precision", precision, PRECISIONS),
    ):
        checked(kind, (name,), tuple(known))
    chosen = _database(db, untuned, {target})
    model = Model(scale, strategy, seed, checkpoint, allow_partial, Capacity(points, boxes), chosen, precision)
    with _stages(f"Compiling for {target}") as announce:
        manifest = compile_model(model, target, out, announce)
    _tell_artifact(out, manifest)


@app.command(name="tune")
def tune_command(
    component: Annotated[list[str] | None, typer.Option(help="Component; repeat for several. Default: all.")] = None,
    target: Annotated[str, typer.Option(help="Target; only llvm can be tuned.")] = "llvm",
    scale: Annotated[str, typer.Option(help="shallow or full: how often each kernel counts.")] = Scale.SHALLOW.value,
    minutes: Annotated[float | None, typer.Option(help="When to stop. Default: 10, or when --trials says so.")] = None,
    trials: Annotated[int | None, typer.Option(help="Schedules to try at most.")] = None,
    db: Annotated[
        Path | None, typer.Option(help="Folder of the database. Default: this machine's in fixtures/tuned.")
    ] = None,
    space: Annotated[
        str, typer.Option(help="schedules: decisions of this project's kernels; rules: TVM's own rules.")
    ] = "schedules",
    only: Annotated[
        str | None, typer.Option(help="With --space rules: a regular expression that a task's name must match.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of candidates and inputs.")] = 0,
    remote: Annotated[
        str | None, typer.Option(help="HOST:PORT of an RPC tracker: measure on the machines that it knows.")
    ] = None,
    key: Annotated[str, typer.Option(help="What those machines are known by at the tracker.")] = "",
    threads: Annotated[
        int | None, typer.Option(help="Threads to measure on. Default: every CPU that may be used.")
    ] = None,
) -> None:
    """Search for better schedules, and keep what is found in a database that verify and compile use.

    Ctrl-C stops it; the same command goes on where it was stopped.
    """
    require_compiler()
    from harness.cli.tune import Request, tune
    from harness.processes.threads import choose_threads, configure_threads

    choose_threads(threads)
    configure_threads()
    request = Request(tuple(component or ()), target, scale, minutes, trials, db, space, seed, remote, key, only)
    code = tune(console, request)
    if code:
        raise typer.Exit(code)


@app.command()
def pack(
    into: Annotated[Path, typer.Option(help="Compiled model that gets other weights.")],
    checkpoint: CheckpointOption = None,
    allow_partial: PartialOption = False,
    seed: SeedOption = 0,
) -> None:
    """Put other weights of the same shapes into a compiled model, without compiling it again."""
    require_compiler()
    from harness.deployment.compiling import Model, pack_model

    with _stages(f"Packing into {into}") as announce:
        manifest = pack_model(Model(seed=seed, checkpoint=checkpoint, allow_partial=allow_partial), into, announce)
    _tell_artifact(into, manifest)


@contextmanager
def _stages(title: str) -> Iterator[Callable[[str], None]]:
    """Shows the stage that runs, and the time of each that has ended."""
    start, running = time.perf_counter(), ""

    def announce(stage: str) -> None:
        nonlocal start, running
        now = time.perf_counter()
        if running:
            console.print(f"{running:<22} {now - start:6.1f} s", highlight=False)
        start, running = now, stage
        status.update(f"{title}: {stage}")

    with console.status(title) as status:
        yield announce
        announce("")


def _tell_artifact(folder: Path, manifest: Manifest) -> None:
    size = sum(file.bytes for file in manifest.files.values())
    console.print(
        f"{folder}: {manifest.scale} scale, {manifest.target} ({manifest.cpu}), {manifest.precision}, "
        f"weights from {manifest.weights}, "
        f"{size / 1e6:.0f} MB in {len(manifest.files) + 1} files; up to {manifest.capacity.points} points "
        f"and {manifest.capacity.boxes} boxes a prompt.",
        highlight=False,
        soft_wrap=True,
    )


@app.command(name="segment")
def segment_command(
    images: Annotated[list[Path], typer.Argument(help="Images, and folders of images.", metavar="IMAGE…")],
    out: Annotated[Path, typer.Option(help="Folder of the results.")],
    text: Annotated[str | None, typer.Option(help="What to look for: a noun phrase.")] = None,
    box: Annotated[
        list[str] | None, typer.Option(help="What to look for is here: x0,y0,x1,y1 in pixels; repeatable.")
    ] = None,
    negative_box: Annotated[list[str] | None, typer.Option(help="It is not here: x0,y0,x1,y1; repeatable.")] = None,
    point: Annotated[list[str] | None, typer.Option(help="It is here: x,y in pixels; repeatable.")] = None,
    negative_point: Annotated[list[str] | None, typer.Option(help="It is not here: x,y; repeatable.")] = None,
    model: Annotated[Path | None, typer.Option(help="Compiled model. Default: dist/sam3-llvm.")] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="Objects that score higher are kept.")] = 0.5,
    threads: Annotated[int | None, typer.Option(help="Threads to run on. Default: every CPU that may be used.")] = None,
    remote: RemoteOption = None,
    key: KeyOption = "",
) -> None:
    """Find what a text, boxes and points mean in images: overlays, masks, and COCO annotations.

    Exit code 0: all images were done; 1: some were not; 2: wrong usage or environment.
    """
    from harness.cli.segment import choose_model, failures, make_prompt, segment
    from harness.processes.threads import choose_threads, configure_threads
    from harness.segment import Job, find_images

    prompt = make_prompt(text, box or (), negative_box or (), point or (), negative_point or ())
    job = Job(find_images(images), prompt, out, threshold)
    folder = choose_model(model)
    devices = chosen_remote(remote, key)
    choose_threads(threads)
    configure_threads()
    failed = failures(segment(console, folder, job, devices))
    for sentence in failed:
        _complain(f"error: {sentence}")
    if failed:
        raise typer.Exit(1)


@app.command(name="serve-device")
def serve_device_command(
    tracker: Annotated[str, typer.Option(help="HOST:PORT of the RPC tracker to register with.")],
    key: Annotated[str, typer.Option(help="What to be known by there.")],
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. Default: any.")] = 0,
    advertise: Annotated[
        str | None, typer.Option(help="Address that clients are told. Default: the one that the tracker sees.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Folder for the weights and code that clients send. Default: the user's cache.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads to run on. Default: every CPU that may be used.")] = None,
) -> None:
    """Let others run what they compile on this machine's devices, until Ctrl-C.

    Whoever reaches the port can run any code here, as with TVM's own RPC server: use it in a network that you trust.
    """
    from harness.cli.serve_device import serve_device
    from harness.processes.threads import choose_threads, configure_threads

    choose_threads(threads)
    configure_threads()
    serve_device(console, Remote(tracker, key), store, host, port, advertise)


@app.command(name="report")
def report_command(
    results: Annotated[
        list[Path], typer.Argument(help="Files of pytest perf … --benchmark-json=FILE.", metavar="RESULTS…")
    ],
    out: Annotated[Path, typer.Option(help="Folder of PERFORMANCE_REPORT.md and its plots.")],
    db: Annotated[Path | None, typer.Option(help="Folder of a tuning database, to list what was found.")] = None,
) -> None:
    """Render the performance report, with plots, from what the suites in perf/ measured."""
    from harness.cli.report import report

    report(console, results, out, db)


@app.command(name="list")
def list_command() -> None:
    """List components, strategies, targets, precisions and scales."""
    components = Table("component", "what", "inputs", "outputs", "strategies", title="Components")
    for entry in SUBJECTS.values():
        components.add_row(
            entry.name,
            entry.summary,
            ", ".join(entry.inputs),
            ", ".join(entry.outputs),
            ", ".join(strategies_of(entry.name)),
        )
    console.print(components)
    for title, registry in (("Strategies", STRATEGIES), ("Targets", TARGETS), ("Precisions", PRECISIONS)):
        table = Table("name", "what", title=title)
        for item in registry.values():
            table.add_row(item.name, item.summary)
        console.print(table)
    console.print(f"Scales: {', '.join(Scale)}. Strategy of components without rotary encoding: {DEFAULT_STRATEGY}.")


@app.command()
def doctor() -> None:
    """Tell what this machine can compile and run, and name known-bad versions with the fix."""
    from harness.cli.doctor import diagnose, render

    findings = diagnose()
    console.print(render(findings))
    if any(finding.problem for finding in findings):
        raise typer.Exit(1)


INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 plus the number of SIGINT, as shells count."""


def main() -> None:
    """Run the command; every expected error is one sentence on stderr."""
    try:
        code = app(standalone_mode=False)
    except (HarnessError, Sam3Error, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        _complain(f"error: {message}")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        _complain("Interrupted: nothing half-written was left; what was cached will be used again.")
    sys.exit(code or 0)


def _complain(sentence: str) -> None:
    Console(stderr=True).print(sentence, markup=False, highlight=False, soft_wrap=True)

"""The stages of a case: build → export → import → compile → load → run → judge.

Everything here happens in one process, which `harness.processes` isolates; the result is plain data.
"""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core.case import DEFAULT_STRATEGY, Case
from harness.core.errors import HarnessError
from harness.core.outcome import CaseError, Device, Kernel, Outcome, Stage, Status, Verdict, VerdictKind
from harness.core.precision import PRECISIONS
from harness.core.settings import Settings
from harness.execution.emulated import Emulation, emulates
from harness.execution.place import Place, place
from harness.execution.remote.errors import DeviceLostError, RemoteError
from harness.lowering.rope import STRATEGIES
from harness.models.sam3.end_to_end import END_TO_END
from harness.runtime.errors import Sam3Error
from harness.runtime.loading import LoadError
from harness.targets import TARGETS

if TYPE_CHECKING:
    from harness.models.sam3.source import Arrays, Source


@dataclass
class Progress:
    """Where the case is, how long each stage took, how large its artifacts are, and which device ran it."""

    announce: Callable[[str], None]
    stage: Stage = Stage.BUILD
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    device: Device | None = None
    kernels: list[Kernel] = field(default_factory=list)
    lost_schedules: list[str] = field(default_factory=list)
    emulated: bool = False

    @contextmanager
    def during(self, stage: Stage) -> Iterator[None]:
        """Announce the stage and add up its time, if it ends well."""
        self.stage = stage
        self.announce(stage.value)
        start = time.perf_counter()
        yield
        self.seconds[stage.value] = self.seconds.get(stage.value, 0.0) + time.perf_counter() - start

    @contextmanager
    def announced(self, stage_of: Callable[[str], Stage]) -> Iterator[Callable[[str], None]]:
        """For work that announces its steps itself: each is a stage, which ends where the next begins."""
        with ExitStack() as current:

            def announce(step: str) -> None:
                current.close()
                current.enter_context(self.during(stage_of(step)))

            yield announce

    def outcome(self, status: Status, error: CaseError | None = None, verdicts: tuple[Verdict, ...] = ()) -> Outcome:
        """The outcome of a case that ends here."""
        return Outcome(
            self.stage,
            status,
            error,
            self.seconds,
            self.sizes,
            verdicts=verdicts,
            device=self.device,
            kernels=tuple(self.kernels),
            emulated=self.emulated,
            lost_schedules=tuple(self.lost_schedules),
        )


def run_request(request: tuple[Case, Settings], announce: Callable[[str], None]) -> Outcome:
    """`run_case` as `harness.processes` calls it, on `harness.processes.threads.thread_count()` threads."""
    from harness.processes.threads import configure_threads

    configure_threads()
    return run_case(*request, announce)


def load_libraries() -> None:
    """Imports what `run_request` takes seconds to import, for the template of its processes.

    PyTorch and TVM import much of themselves on first use, so a small module is exported, imported and lowered. No
    library is written, which would stay if this process is killed; no thread is left running, which forks would miss.
    """
    import torch
    from tqdm import tqdm

    from harness.lowering.frontends.torch_export import export_program
    from harness.models.sam3.source import Source  # noqa: F401
    from harness.models.sam3.upstream import import_sam3
    from harness.targets.compiling import lower_module

    tqdm.monitor_interval = 0  # its bars, which the import makes, would start a thread
    import_sam3()
    program = export_program(torch.nn.Linear(1, 1), (torch.zeros(1, 1),))
    module, _ = STRATEGIES[DEFAULT_STRATEGY].import_program(program)
    target = TARGETS["llvm"]
    lower_module(module, target, target.tvm_target())


def run_case(case: Case, settings: Settings, announce: Callable[[str], None] = lambda stage: None) -> Outcome:
    """Walk one case through its stages; every error of the case becomes part of the outcome.

    Args:
        case: What to run.
        settings: Weights, inputs, expectation.
        announce: Called with the name of each stage as it begins.

    Raises:
        HarnessError, Sam3Error: If the input or the environment is at fault, not the case.
    """
    from harness.models.sam3.upstream import upstream

    target = TARGETS[case.target]
    progress = Progress(announce)
    problem = target.compile_problem()
    if problem is not None:
        return progress.outcome(Status.UNAVAILABLE, CaseError("CannotCompile", problem))
    try:
        with upstream():
            return _walk(case, settings, progress)
    except LoadError as error:
        return progress.outcome(Status.FAILED, _described(error))
    except DeviceLostError as error:
        return progress.outcome(Status.CRASHED, CaseError("DeviceLost", str(error)))
    except RemoteError as error:
        return progress.outcome(Status.FAILED, CaseError(error.type, str(error)[:4000], error.details))
    except (HarnessError, Sam3Error):
        raise
    except MemoryError as error:
        return progress.outcome(Status.OUT_OF_MEMORY, _described(error))
    except Exception as error:
        return progress.outcome(Status.FAILED, _described(error))


def _walk(case: Case, settings: Settings, progress: Progress) -> Outcome:
    from harness.parity.cache import cache_root

    saved = cache_root() / "outputs" / f"{case.id}-{case.seed}"
    here = Emulation() if settings.remote is None and emulates(case, settings.emulate) else None
    with closing(here or place(settings.remote)) as runs_at:
        try:
            if case.component == END_TO_END.name:
                from harness.models.sam3.end_to_end.walk import walk

                verdicts = walk(case, settings, progress, saved, runs_at)
            else:
                verdicts = _walk_component(case, settings, progress, saved, runs_at)
        finally:
            progress.device = runs_at.device()
            progress.emulated = here is not None and progress.stage in (Stage.LOAD, Stage.RUN, Stage.JUDGE)
        if verdicts is None:
            problem = runs_at.run_problem(case.target) or ""
            return progress.outcome(Status.UNAVAILABLE, CaseError("CannotRun", problem))
    faults = [verdict for verdict in verdicts if verdict.kind not in (VerdictKind.STRICT, VerdictKind.ORACLE)]
    if not faults:
        return progress.outcome(Status.PASSED, verdicts=verdicts)
    message = f"{len(faults)} of {len(verdicts)} outputs: {faults[0].name}: {faults[0].reason}"
    return progress.outcome(Status.FAILED, CaseError("ParityError", message), verdicts)


def _walk_component(
    case: Case, settings: Settings, progress: Progress, saved: Path, runs_at: Place
) -> tuple[Verdict, ...] | None:
    """The verdicts on a component; None if it can be compiled but not run."""
    from harness.parity.saved import load_outputs, save_outputs
    from harness.parity.verdict import judge

    with progress.during(Stage.BUILD):
        source = _source(case, settings)
    if settings.judge_saved:
        actual = load_outputs(saved)
    else:
        ran = _compile_and_run(case, settings, source, progress, runs_at)
        if ran is None:
            return None
        actual = ran
        save_outputs(saved, actual)
    with progress.during(Stage.JUDGE):
        reference, again = source.reference()
        return judge(
            actual,
            reference,
            source.oracle(),
            reference_again=again,
            expectation=settings.expectation,
            by_oracle=PRECISIONS[case.precision].is_half,
        )


def _source(case: Case, settings: Settings) -> Source:
    if PRECISIONS[case.precision].is_half:
        from harness.parity.autocast import HalfSource

        return HalfSource(case, settings)
    from harness.models.sam3.source import Source

    return Source(case, settings)


def _compile_and_run(
    case: Case, settings: Settings, source: Source, progress: Progress, runs_at: Place
) -> Arrays | None:
    """From the module to the outputs of the compiled code; None if it can be compiled but not run."""
    from harness.lowering.frontends.torch_export import export_program
    from harness.lowering.precision import lower_precision, parameters_for
    from harness.targets.compiling import LIBRARY_SUFFIX, compile_module
    from harness.tuning.database import schedules_from

    target, strategy, precision = TARGETS[case.target], STRATEGIES[case.strategy], PRECISIONS[case.precision]
    with progress.during(Stage.EXPORT), strategy.apply(source.module):
        programs = {
            sample: export_program(source.module, tuple(args.values())) for sample, args in source.samples.items()
        }
    with progress.during(Stage.IMPORT):
        imported = {}
        for sample, program in programs.items():
            module, values = strategy.import_program(program)
            imported[sample] = lower_precision(module, precision), values
    del programs
    actual: Arrays = {}
    schedules = schedules_from(settings.database, case.target)
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as folder:
        libraries = {sample: Path(folder) / f"{sample}{LIBRARY_SUFFIX}" for sample in imported}
        with progress.during(Stage.COMPILE):
            for sample, (module, _) in imported.items():
                compiled = compile_module(
                    module, target, libraries[sample], schedules, keep_source=runs_at.reads_source
                )
                progress.kernels += compiled.kernels
                progress.lost_schedules += compiled.lost_schedules
        progress.sizes["library"] = sum(path.stat().st_size for path in libraries.values())
        if runs_at.run_problem(case.target) is not None:
            return None
        for sample, library in libraries.items():
            module, values = imported.pop(sample)
            parameters = parameters_for(module, list(values.values()))
            del values
            # All samples have the same weights; their sizes differ by a few constants.
            progress.sizes["parameters"] = sum(array.nbytes for array in parameters)
            with progress.during(Stage.LOAD):
                executable = runs_at.executable(library, case.target, parameters)
            del parameters
            with progress.during(Stage.RUN):
                results = executable.run([tensor.numpy() for tensor in source.samples[sample].values()])
            actual |= source.named(sample, results)
            # Two samples of a large component, packed, would not fit side by side.
            del executable
            gc.collect()
    runs_at.close()  # others may be waiting for the device
    return actual


def _described(error: BaseException) -> CaseError:
    details = "".join(traceback.format_exception(error))
    return CaseError(type(error).__name__, str(error)[:4000], details[-8000:])

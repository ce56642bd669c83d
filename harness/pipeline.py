"""The stages of a case: build → export → import → compile → load → run → judge.

Everything here happens in one process, which `harness.worker` isolates; the result is plain data.
"""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.case import Case
from harness.end_to_end import END_TO_END
from harness.errors import HarnessError
from harness.outcome import CaseError, Outcome, Stage, Status, Verdict, VerdictKind
from harness.rope import STRATEGIES
from harness.runtime.errors import Sam3Error
from harness.runtime.loading import LoadError
from harness.settings import Settings
from harness.targets import TARGETS

if TYPE_CHECKING:
    from harness.source import Arrays, Source


@dataclass
class Progress:
    """Where the case is, how long each stage took, and how large its artifacts are."""

    announce: Callable[[str], None]
    stage: Stage = Stage.BUILD
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

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
        return Outcome(self.stage, status, error, self.seconds, self.sizes, verdicts=verdicts)


def run_request(request: tuple[Case, Settings], announce: Callable[[str], None]) -> Outcome:
    """`run_case` as `harness.worker` calls it, on `harness.threads.thread_count()` threads."""
    from harness.threads import configure_threads

    configure_threads()
    return run_case(*request, announce)


def run_case(case: Case, settings: Settings, announce: Callable[[str], None] = lambda stage: None) -> Outcome:
    """Walk one case through its stages; every error of the case becomes part of the outcome.

    Args:
        case: What to run.
        settings: Weights, inputs, expectation.
        announce: Called with the name of each stage as it begins.

    Raises:
        HarnessError, Sam3Error: If the input or the environment is at fault, not the case.
    """
    from harness.model.upstream import upstream

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
    except (HarnessError, Sam3Error):
        raise
    except MemoryError as error:
        return progress.outcome(Status.OUT_OF_MEMORY, _described(error))
    except Exception as error:
        return progress.outcome(Status.FAILED, _described(error))


def _walk(case: Case, settings: Settings, progress: Progress) -> Outcome:
    from harness.parity.cache import cache_root

    saved = cache_root() / "outputs" / f"{case.id}-{case.seed}"
    if case.component == END_TO_END.name:
        from harness.end_to_end.walk import walk

        verdicts = walk(case, settings, progress, saved)
    else:
        verdicts = _walk_component(case, settings, progress, saved)
    if verdicts is None:
        problem = TARGETS[case.target].run_problem() or ""
        return progress.outcome(Status.UNAVAILABLE, CaseError("CannotRun", problem))
    faults = [verdict for verdict in verdicts if verdict.kind not in (VerdictKind.STRICT, VerdictKind.ORACLE)]
    if not faults:
        return progress.outcome(Status.PASSED, verdicts=verdicts)
    message = f"{len(faults)} of {len(verdicts)} outputs: {faults[0].name}: {faults[0].reason}"
    return progress.outcome(Status.FAILED, CaseError("ParityError", message), verdicts)


def _walk_component(case: Case, settings: Settings, progress: Progress, saved: Path) -> tuple[Verdict, ...] | None:
    """The verdicts on a component; None if this machine can compile but not run it."""
    from harness.parity.saved import load_outputs, save_outputs
    from harness.parity.verdict import judge
    from harness.source import Source

    with progress.during(Stage.BUILD):
        source = Source(case, settings)
    if settings.judge_saved:
        actual = load_outputs(saved)
    else:
        ran = _compile_and_run(case, settings, source, progress)
        if ran is None:
            return None
        actual = ran
        save_outputs(saved, actual)
    with progress.during(Stage.JUDGE):
        reference, again = source.reference()
        return judge(actual, reference, source.oracle(), reference_again=again, expectation=settings.expectation)


def _compile_and_run(case: Case, settings: Settings, source: Source, progress: Progress) -> Arrays | None:
    """From the module to the outputs of the compiled code; None if this machine can compile but not run it."""
    from harness.frontend import export_program
    from harness.runtime.executable import Executable
    from harness.targets.compiling import LIBRARY_SUFFIX, compile_module
    from harness.tuning.database import schedules_from

    target, strategy = TARGETS[case.target], STRATEGIES[case.strategy]
    with progress.during(Stage.EXPORT), strategy.apply(source.module):
        programs = {
            sample: export_program(source.module, tuple(args.values())) for sample, args in source.samples.items()
        }
    with progress.during(Stage.IMPORT):
        imported = {sample: strategy.import_program(program) for sample, program in programs.items()}
    del programs
    actual: Arrays = {}
    schedules = schedules_from(settings.database, case.target)
    with tempfile.TemporaryDirectory(prefix="sam3-tvm-") as folder:
        libraries = {sample: Path(folder) / f"{sample}{LIBRARY_SUFFIX}" for sample in imported}
        with progress.during(Stage.COMPILE):
            for sample, (module, _) in imported.items():
                compile_module(module, target, libraries[sample], schedules)
        progress.sizes["library"] = sum(path.stat().st_size for path in libraries.values())
        if target.run_problem() is not None:
            return None
        for sample, library in libraries.items():
            parameters = list(imported.pop(sample)[1].values())
            # All samples have the same weights; their sizes differ by a few constants.
            progress.sizes["parameters"] = sum(array.nbytes for array in parameters)
            with progress.during(Stage.LOAD):
                executable = Executable(library, target.device(), parameters)
            del parameters
            with progress.during(Stage.RUN):
                results = executable.run([tensor.numpy() for tensor in source.samples[sample].values()])
            actual |= source.named(sample, results)
            # Two samples of a large component, packed, would not fit side by side.
            del executable
            gc.collect()
    return actual


def _described(error: BaseException) -> CaseError:
    details = "".join(traceback.format_exception(error))
    return CaseError(type(error).__name__, str(error)[:4000], details[-8000:])

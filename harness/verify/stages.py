"""Runs the stages of a case: build → export → import → compile → load → run → judge.

All stages run in one process, which `harness.core.processes` isolates; the result is plain data.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import closing

import torch

from harness.compiler.execution.executors import create_emulating_executor, create_executor, is_emulated
from harness.compiler.execution.remote.client import DeviceLostError
from harness.compiler.execution.run import Run
from harness.compiler.lowering.route import lower
from harness.compiler.targets import HOST, TARGETS
from harness.compiler.targets.compiling import lower_module
from harness.compiler.tuned.database import choose_schedules
from harness.core.case import Case
from harness.core.errors import HarnessError
from harness.core.outcome import CaseError, Outcome, Progress, Stage, Status
from harness.core.settings import Settings
from harness.models.registry import models, subjects
from harness.runtime.errors import ModelError
from harness.runtime.loading import LoadError


def load_libraries() -> None:
    """Imports libraries that `run_case` takes seconds to import, for the template of its processes.

    PyTorch and TVM import many of their modules on first use, so a small module is exported, imported and lowered. No
    library is written, because it would stay if this process is killed. No thread stays running, because forks would
    lack it.
    """
    for model in models().values():
        model.prepare()
    lowered = lower(torch.nn.Linear(1, 1), (torch.zeros(1, 1),))
    lower_module(lowered.module, HOST, HOST.tvm_target())


def run_case(case: Case, settings: Settings, on_stage: Callable[[str], None] = lambda stage: None) -> Outcome:
    """Runs one case through its stages; every error of the case becomes part of the outcome.

    Args:
        case: The case.
        settings: Weights, inputs and expectation.
        on_stage: Called with the name of each stage as it begins.

    Raises:
        HarnessError, ModelError: The input or the environment is wrong, not the case.
    """
    target = TARGETS[case.target]
    progress = Progress(on_stage)
    problem = target.compile_problem()
    if problem is not None:
        return progress.end(Status.UNAVAILABLE, CaseError("CannotCompile", problem))
    try:
        with models()[subjects()[case.component].model].context():
            return _run_stages(case, settings, progress)
    except LoadError as error:
        return progress.end(Status.FAILED, _case_error(error))
    except DeviceLostError as error:
        return progress.end(Status.CRASHED, CaseError("DeviceLost", str(error)))
    except (HarnessError, ModelError):
        raise
    except MemoryError as error:
        return progress.end(Status.OUT_OF_MEMORY, _case_error(error))
    except Exception as error:
        return progress.end(Status.FAILED, _case_error(error))


def _run_stages(case: Case, settings: Settings, progress: Progress) -> Outcome:
    subject = subjects()[case.component]
    emulated = settings.remote is None and is_emulated(case, subject.emulated, settings.emulate, settings.processors)
    with closing(
        create_emulating_executor(case, settings.processors) if emulated else create_executor(settings)
    ) as executor:
        try:
            with progress.time_stage(Stage.BUILD):
                workload = subject.open(case, settings)
            schedules = choose_schedules(settings.database, case.target, settings.processors)
            run = Run(case, settings, progress, executor, schedules)
            has_run = settings.judge_saved or workload.run(run)
            if has_run:
                with progress.time_stage(Stage.JUDGE):
                    verdicts = workload.judge(settings.expectation)
        finally:
            progress.outcome.device = executor.describe_device()
            progress.outcome.emulated = emulated and progress.outcome.stage in (Stage.LOAD, Stage.RUN, Stage.JUDGE)
        if not has_run:
            problem = executor.run_problem(case.target) or ""
            return progress.end(Status.UNAVAILABLE, CaseError("CannotRun", problem))
    faults = [verdict for verdict in verdicts if not verdict.kind.passes]
    if not faults:
        return progress.end(Status.PASSED, verdicts=verdicts)
    message = f"{len(faults)} of {len(verdicts)} outputs: {faults[0].name}: {faults[0].reason}"
    return progress.end(Status.FAILED, CaseError("ParityError", message), verdicts)


def _case_error(error: BaseException) -> CaseError:
    details = "".join(traceback.format_exception(error))
    return CaseError(type(error).__name__, str(error)[:4000], details[-8000:])

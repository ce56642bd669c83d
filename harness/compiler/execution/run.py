"""Runs workloads: lowers their programs, compiles them for the case's target, and calls them as a trace says."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from harness.compiler.execution.executors import Executor
from harness.compiler.execution.remote.client import RemoteExecutable
from harness.compiler.lowering.route import Lowered, Route
from harness.compiler.schedules import ChosenSchedules
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import LIBRARY_SUFFIX, compile_module
from harness.core.budget import check_groups
from harness.core.case import Case
from harness.core.files import temporary_folder
from harness.core.outcome import Progress, Stage
from harness.core.program import Arrays, Output, Program, Trace
from harness.core.settings import Settings
from harness.runtime.executable import Executable


@dataclass(frozen=True)
class Run:
    """The settings and tools that a workload is run with.

    Attributes:
        case: Determines how programs are lowered and compiled.
        settings: Weights, inputs and the processors to compile for.
        progress: Records stages, times, sizes and kernels.
        executor: Runs the compiled code.
        schedules: Tuned schedules for the target.
    """

    case: Case
    settings: Settings
    progress: Progress
    executor: Executor
    schedules: ChosenSchedules

    def compile(
        self, programs: Mapping[str, Program], lowered: Mapping[str, Lowered] | None = None
    ) -> CompiledPrograms | None:
        """Compiles programs, to run traces of them.

        Args:
            programs: Programs by name.
            lowered: The programs as Relax modules; lowered by the case's route if None.

        Returns:
            The compiled programs, to be closed by the caller; None if they cannot run here.

        Raises:
            HarnessError: No program has one of the groups that are to stay float32.
        """
        lowered = self._lower_programs(programs) if lowered is None else lowered
        with ExitStack() as stack:
            folder = Path(stack.enter_context(temporary_folder("run")))
            libraries = {name: folder / f"{name}{LIBRARY_SUFFIX}" for name in lowered}
            self._compile(lowered, libraries)
            if self.executor.run_problem(self.case.target) is not None:
                return None
            return CompiledPrograms(self, programs, lowered, libraries, stack.pop_all())

    def _compile(self, lowered: Mapping[str, Lowered], libraries: Mapping[str, Path]) -> None:
        outcome = self.progress.outcome
        with self.progress.time_stage(Stage.COMPILE):
            target = TARGETS[self.case.target]
            for name, program in lowered.items():
                compiled = compile_module(
                    program.module,
                    target,
                    libraries[name],
                    self.schedules.schedules,
                    processors=self.settings.processors,
                    for_emulation=self.executor.emulates,
                )
                outcome.kernels += compiled.kernels
                outcome.lost_schedules += compiled.lost_schedules
        outcome.sizes["library"] = sum(path.stat().st_size for path in libraries.values())

    def _lower_programs(self, programs: Mapping[str, Program]) -> dict[str, Lowered]:
        float32 = self.settings.float32
        route = Route.from_case(self.case, float32)
        with self.progress.time_stage(Stage.EXPORT):
            exported = {
                name: route.export(program.module, tuple(program.example.values()), program.axes)
                for name, program in programs.items()
            }
        with self.progress.time_stage(Stage.IMPORT):
            lowered = {name: route.lower(exported.pop(name), program.module) for name, program in programs.items()}
        check_groups(float32, [program.float32 for program in lowered.values()], self.case.component)
        return lowered


@dataclass
class CompiledPrograms:
    """Programs that were compiled for a case, in a folder that is deleted by `close`.

    Attributes:
        run: The run that compiled them.
        programs: The programs by name.
        lowered: The Relax module of each.
        libraries: The library of each.
        stack: Deletes the libraries when it is closed.
    """

    run: Run
    programs: Mapping[str, Program]
    lowered: Mapping[str, Lowered]
    libraries: Mapping[str, Path]
    stack: ExitStack

    def close(self) -> None:
        """Deletes the libraries, after which nothing can be run."""
        self.lowered = {}
        self.stack.close()

    def run_trace(self, trace: Trace, progress: Progress | None = None) -> Arrays:
        """Runs a trace of the programs, with the current values of the parameters.

        Contiguous parameters share memory with those of the PyTorch modules, so that changes of a module in place take
        effect here.

        Args:
            trace: The calls.
            progress: Records the stages; the case's own by default.

        Returns:
            The outputs of all calls by name.
        """
        progress = progress or self.run.progress
        last_calls = {call.program: call.name for call in trace}
        later_inputs = {
            (value.call, value.name) for call in trace for value in call.arguments if isinstance(value, Output)
        }
        loaded: dict[str, Executable | RemoteExecutable] = {}
        state: dict[tuple[str, str], npt.NDArray[Any]] = {}
        outputs: Arrays = {}
        for call in trace:
            if call.program not in loaded:
                loaded[call.program] = self._load_program(call.program, progress)
            inputs = [
                state[value.call, value.name] if isinstance(value, Output) else value.numpy()
                for value in call.arguments
            ]
            with progress.time_stage(Stage.RUN):
                results = loaded[call.program].run(inputs)
            for name, array in zip(self.programs[call.program].outputs, results, strict=True):
                outputs[f"{call.prefix}{name}"] = array
                if (call.name, name) in later_inputs:
                    state[call.name, name] = array
            if last_calls[call.program] == call.name:
                # Two programs of a large subject, their weights packed, would not fit side by side.
                del loaded[call.program]
                gc.collect()
        self.run.executor.close()  # others may be waiting for the device
        return outputs

    def _load_program(self, name: str, progress: Progress) -> Executable | RemoteExecutable:
        parameters = list(self.lowered[name].parameters().values())
        # All programs of a component have the same weights; their sizes differ by a few constants.
        progress.outcome.sizes["parameters"] = sum(array.nbytes for array in parameters)
        with progress.time_stage(Stage.LOAD):
            executor, target = self.run.executor, self.run.case.target
            return executor.load_program(self.libraries[name], target, parameters)

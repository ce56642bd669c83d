"""Running a workload: its programs lowered, compiled for the case's target and called, one trace after another."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from harness.compiler.execution.executors import Executor, LoadedProgram
from harness.compiler.lowering.route import Lowered, Route
from harness.compiler.schedules import ChosenSchedules
from harness.compiler.targets import TARGETS
from harness.compiler.targets.compiling import LIBRARY_SUFFIX, compile_module
from harness.core.budget import NO_GROUPS, Groups, check_groups
from harness.core.case import Case
from harness.core.files import temporary_folder
from harness.core.outcome import Stage
from harness.core.program import Arrays, Output, Program, Trace
from harness.core.progress import Progress
from harness.core.settings import Settings


@dataclass(frozen=True)
class Run:
    """Everything that a workload is run with.

    Attributes:
        case: How it is lowered and what it is compiled for.
        settings: Weights, inputs and the processors to compile for.
        progress: Keeps which stage it is, and what was made.
        executor: What runs compiled code.
        schedules: What tuning found for the target.
        float32: Groups of products that stay float32 in a half precision.
    """

    case: Case
    settings: Settings
    progress: Progress
    executor: Executor
    schedules: ChosenSchedules
    float32: Groups = NO_GROUPS

    def compiled(
        self, programs: Mapping[str, Program], lowered: Mapping[str, Lowered] | None = None
    ) -> Compiled | None:
        """Compiles programs, to run traces of them.

        Args:
            programs: Programs by name.
            lowered: The same as Relax modules, for whoever has lowered them.

        Returns:
            What was compiled, to be closed; None if it cannot be run here.

        Raises:
            HarnessError: No program has one of the groups that are to stay float32.
        """
        lowered = self._lowered(programs) if lowered is None else lowered
        with ExitStack() as made:
            folder = Path(made.enter_context(temporary_folder("run")))
            libraries = {name: folder / f"{name}{LIBRARY_SUFFIX}" for name in lowered}
            self._compile(lowered, libraries)
            if self.executor.run_problem(self.case.target) is not None:
                return None
            return Compiled(self, programs, lowered, libraries, made.pop_all())

    def _compile(self, lowered: Mapping[str, Lowered], libraries: Mapping[str, Path]) -> None:
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
                self.progress.kernels += compiled.kernels
                self.progress.lost_schedules += compiled.lost_schedules
        self.progress.sizes["library"] = sum(path.stat().st_size for path in libraries.values())

    def _lowered(self, programs: Mapping[str, Program]) -> dict[str, Lowered]:
        route = Route.from_case(self.case, self.float32)
        with self.progress.time_stage(Stage.EXPORT):
            exported = {
                name: route.export(program.module, tuple(program.example.values()), program.axes)
                for name, program in programs.items()
            }
        with self.progress.time_stage(Stage.IMPORT):
            lowered = {name: route.lower(exported.pop(name), program.module) for name, program in programs.items()}
        check_groups(self.float32, [program.float32 for program in lowered.values()], self.case.component)
        return lowered


class Compiled:
    """Programs that were compiled for a case, in a folder that is there until this is closed."""

    def __init__(
        self,
        run: Run,
        programs: Mapping[str, Program],
        lowered: Mapping[str, Lowered],
        libraries: Mapping[str, Path],
        made: ExitStack,
    ) -> None:
        """Takes what was compiled.

        Args:
            run: What it was compiled with.
            programs: The programs by name.
            lowered: What each was lowered to.
            libraries: The library of each.
            made: Deletes these.
        """
        self._run = run
        self._programs = programs
        self._lowered = lowered
        self._libraries = libraries
        self._made = made

    def close(self) -> None:
        """Deletes the libraries; nothing can be run any more."""
        self._lowered = {}
        self._made.close()

    def outputs(self, trace: Trace, progress: Progress | None = None) -> Arrays:
        """Runs a trace of the programs, with the parameters as they are now.

        These share memory with the parameters of the PyTorch modules, where those are contiguous: what changes a module
        in place changes what is run here.

        Args:
            trace: The calls.
            progress: Is told of the stages; the case's own if there is none.

        Returns:
            The outputs of all calls by name.
        """
        progress = progress or self._run.progress
        last = {call.program: call.name for call in trace}
        read = {(value.call, value.name) for call in trace for value in call.arguments if isinstance(value, Output)}
        loaded: dict[str, LoadedProgram] = {}
        state: dict[tuple[str, str], npt.NDArray[Any]] = {}
        outputs: Arrays = {}
        for call in trace:
            if call.program not in loaded:
                loaded[call.program] = self._loaded(call.program, progress)
            inputs = [
                state[value.call, value.name] if isinstance(value, Output) else value.numpy()
                for value in call.arguments
            ]
            with progress.time_stage(Stage.RUN):
                results = loaded[call.program].run(inputs)
            for name, array in zip(self._programs[call.program].outputs, results, strict=True):
                outputs[f"{call.prefix}{name}"] = array
                if (call.name, name) in read:
                    state[call.name, name] = array
            if last[call.program] == call.name:
                # Two programs of a large subject, their weights packed, would not fit side by side.
                del loaded[call.program]
                gc.collect()
        self._run.executor.close()  # others may be waiting for the device
        return outputs

    def _loaded(self, name: str, progress: Progress) -> LoadedProgram:
        parameters = list(self._lowered[name].parameters().values())
        # All programs of a component have the same weights; their sizes differ by a few constants.
        progress.sizes["parameters"] = sum(array.nbytes for array in parameters)
        with progress.time_stage(Stage.LOAD):
            executor, target = self._run.executor, self._run.case.target
            return executor.executable(self._libraries[name], target, parameters)
